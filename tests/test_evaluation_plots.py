"""Pictures of the results: which lines are in which panel, and that nothing hides them."""

import xml.etree.ElementTree

import pytest

from hf_poslsh.evaluation import plot_by_length, plot_by_position, plot_retrieval, plots


@pytest.fixture
def results():
    def summary(value, **fields):
        intervals = {"loss": (value - 0.1, value + 0.2), "perplexity": None}
        runs = {"perplexity": [value - 1, value + 1]}
        return {"loss": value, "perplexity": value, "intervals": intervals, "runs": runs, **fields}

    arms = {
        arm: {
            "lengths": {"700": summary(9 * worse), "512": summary(8 * worse)},
            "positions": [summary(2 * worse, **{"from": 0, "to": 9}), summary(3 * worse, **{"from": 9, "to": 60})],
        }
        for arm, worse in (("plsh", 1.0), ("rope", 1.5))
    }
    return {"arms": arms}


@pytest.fixture
def drawn(monkeypatch):
    """Figures and panels of all plots."""
    plotted = []
    save = plots._save
    monkeypatch.setattr(plots, "_save", lambda *arguments: (plotted.append(arguments[:2]), save(*arguments)))
    return plotted


def plot_both(results, path, count):
    arms = {f"arm {index}": results["arms"]["rope"] for index in range(count)}
    plot_by_position({arm: content["positions"] for arm, content in arms.items()}, path, training_length=9)
    lengths = {arm: content["lengths"] for arm, content in arms.items()}
    plot_by_length(lengths, path, protocol="same-targets", training_length=512)


def test_six_arms_share_a_panel_beside_which_they_are_named(results, tmp_path, drawn):
    plot_both(results, tmp_path / "plot.png", 6)
    for figure, ((axes, names),) in drawn:
        lines = [line for line in axes.get_lines() if line.get_label() in names]
        assert len({(line.get_color(), line.get_marker()) for line in lines}) == len(names) == 6
        (legend,) = figure.legends
        assert len(legend.get_texts()) == 7
        assert legend.get_window_extent().x0 >= axes.get_window_extent().x1


@pytest.mark.parametrize(("count", "sizes"), [(7, [4, 4]), (12, [4, 5, 5]), (17, [5, 5, 5, 5])])
def test_more_arms_are_drawn_in_panels_with_the_first_in_grey(results, tmp_path, drawn, count, sizes):
    plot_both(results, tmp_path / "plot.png", count)
    for figure, panels in drawn:
        figure.draw_without_rendering()
        assert [len(names) for _, names in panels] == sizes
        assert [name for _, names in panels for name in names[1:]] == [f"arm {index}" for index in range(1, count)]
        for axes, names in panels:
            colors = {line.get_label(): line.get_color() for line in axes.get_lines() if line.get_label() in names}
            assert list(colors) == names
            assert (names[0], colors["arm 0"]) == ("arm 0", "0.5")
            assert len(set(colors.values())) == len(names)
            assert (axes.get_xlim(), axes.get_ylim()) == (panels[0][0].get_xlim(), panels[0][0].get_ylim())
            assert [text.get_text() for text in axes.get_legend().get_texts()] == [*names, "training length"]
            assert axes.get_legend().get_window_extent().y0 >= axes.get_window_extent().y1
        # The lowest panel of each column says what the places on its axis are.
        labelled = [axes.xaxis.get_tick_params()["labelbottom"] for axes, _ in panels]
        assert labelled == [False] * (len(panels) - 2) + [True] * 2


def test_plots_name_every_arm(results, tmp_path):
    arms = results["arms"]
    path = tmp_path / "perplexity.svg"
    plot_by_length(
        {arm: content["lengths"] for arm, content in arms.items()},
        path,
        protocol="same-targets",
        training_length=512,
        title="t",
    )
    xml.etree.ElementTree.parse(path)
    positions = {arm: content["positions"] for arm, content in arms.items()}
    plot_by_position(positions, tmp_path / "positions.png", training_length=9)
    assert (tmp_path / "positions.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no perplexities"):
        plot_by_length({"a": {}}, path, protocol="same-targets")
    with pytest.raises(ValueError, match="no losses"):
        plot_by_position({"a": []}, path)


def test_heat_maps_have_a_panel_per_arm_and_the_depths_from_the_start_down(tmp_path, monkeypatch):
    figures = []
    empty = plots._empty_figure
    monkeypatch.setattr(plots, "_empty_figure", lambda size: figures.append(empty(size)) or figures[-1])
    cells = [
        {"length": length, "depth": depth, "accuracy": depth * length / 1000}
        for length in (500, 1000)
        for depth in (1.0, 0.0)
    ]
    plot_retrieval({"plsh": cells, "rope": cells}, tmp_path / "map.png", title="t")
    ((first, second, _),) = [figure.axes for figure in figures]
    for panel, arm in ((first, "plsh"), (second, "rope")):
        assert panel.get_title() == arm
        assert panel.get_images()[0].get_array().tolist() == [[0, 0], [0.5, 1]]
        assert [label.get_text() for label in panel.get_xticklabels()] == ["500", "1000"]
    with pytest.raises(ValueError, match="no retrieval to plot"):
        plot_retrieval({"a": []}, tmp_path / "map.png")
