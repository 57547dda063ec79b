"""Checks what a wheel and an sdist hold: .ci/contents.py WHEEL SDIST SOURCE, the folder that they were built from."""

import sys
import tarfile
import zipfile
from pathlib import Path

with zipfile.ZipFile(sys.argv[1]) as archive:
    wheel = archive.namelist()
with tarfile.open(sys.argv[2]) as archive:
    sdist = [name.partition("/")[2] for name in archive.getnames()]
info = next(name for name in wheel if name.endswith(".dist-info/METADATA")).rpartition("/")[0]
source = Path(sys.argv[3])
package = [str(path.relative_to(source)) for path in source.glob("hf_poslsh/**/*") if path.is_file()]
licences = [f"{info}/licenses/LICENSE", f"{info}/licenses/THIRD_PARTY_NOTICES"]
problems = [f"wheel lacks {name}" for name in (*package, *licences, "hf_poslsh/py.typed") if name not in wheel]
problems += [f"sdist lacks {name}" for name in (*package, "LICENSE", "README.md") if name not in sdist]
tops = {name.split("/")[0] for name in wheel} - {info}
problems += [f"wheel holds {name}" for name in sorted(tops) if not name.startswith("hf_poslsh")]
problems += [f"wheel holds {name}" for name in wheel if name.endswith((".nbi", ".nbc", ".pyc")) or "/tests/" in name]
if problems:
    sys.exit("\n".join(problems))
print(f"{len(wheel)} files in the wheel, {len(sdist)} in the sdist")
