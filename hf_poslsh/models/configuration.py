"""What a patched model's config adds to the host's: the method, and a config.json that no stock class accepts."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig

from hf_poslsh.models import shim
from hf_poslsh.models.attention import ATTENTION_NAME

if TYPE_CHECKING:
    _HostConfig = PreTrainedConfig
else:
    _HostConfig = object

_ROPE_TYPE = "poslsh (pip install hf-poslsh; import hf_poslsh)"  # what a stock class's KeyError will say


def check_attention_name(requested: Any) -> str:
    """``"poslsh"``, the only attention of a patched model, if that or nothing in particular is requested.

    Raises:
        ValueError: another attention is requested; honouring it would run the unpatched model.
    """
    if isinstance(requested, dict):
        requested = requested.get("")
    if requested not in (None, ATTENTION_NAME):
        raise ValueError(
            f"attn_implementation={requested!r} is not supported by a patched model, only {ATTENTION_NAME!r}; "
            "call hf_poslsh.unpatch_model(model) first, or load the original checkpoint."
        )
    return ATTENTION_NAME


class _SelfDescribing(_HostConfig):
    """Writes a config.json that loads as the patched model or not at all.

    In memory all host fields have their real values. In config.json ``rope_parameters`` is wrapped in a
    ``rope_type`` that no stock model knows, and the attention is named: a stock class refuses the file whatever
    it is told, where it would otherwise run the weights without the method.
    """

    # Written for config.json alone, but TRL reads it from every config whose class transformers does not know.
    auto_map: ClassVar[dict[str, str]] = {}

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: transformers would copy this package's source files into every checkpoint."""

    def _guard(self, content: dict[str, Any]) -> None:
        """Adds what stock classes stumble over to the content of a config.json."""
        content["attn_implementation"] = ATTENTION_NAME
        content["rope_parameters"] = {"rope_type": _ROPE_TYPE, "base": content.get("rope_parameters")}

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """The host's, guarded."""
        from hf_poslsh import __version__

        super().to_json_file(json_file_path, use_diff=use_diff)
        with open(json_file_path, encoding="utf-8") as file:
            content = json.load(file)
        self._guard(content)
        content["poslsh_version"] = __version__
        content["auto_map"] = shim.auto_map(type(self).__name__, self.architectures)
        with open(json_file_path, "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """The host's, and beside config.json the module that ``trust_remote_code=True`` looks for."""
        os.makedirs(save_directory, exist_ok=True)
        shim.write_shim(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)
        kwargs.pop("poslsh_version", None)
        super().__post_init__(**kwargs)


class PosLSHConfigMixin(_SelfDescribing):
    """A host's text config with ``poslsh``, the fields of a ``PosLSHConfig``, or None."""

    poslsh: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        rope: Any = self.rope_parameters
        if isinstance(rope, dict) and str(rope.get("rope_type")).startswith(ATTENTION_NAME):
            self.rope_parameters = rope["base"]
        super().__post_init__(**kwargs)

    @property
    def _attn_implementation(self) -> str:
        return ATTENTION_NAME

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        self._attn_implementation_internal = check_attention_name(value)


class PosLSHCompositeConfigMixin(_SelfDescribing):
    """A host's config whose ``text_config`` is patched and whose other parts are not."""

    text_class: ClassVar[type]
    if TYPE_CHECKING:
        text_config: Any

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.text_config, dict):
            self.text_config = self.text_class(**self.text_config)
        super().__post_init__(**kwargs)

    def _guard(self, content: dict[str, Any]) -> None:
        super()._guard(content["text_config"])
        del content["text_config"]["attn_implementation"]  # only honoured at the top
        content["attn_implementation"] = {"text_config": ATTENTION_NAME}
