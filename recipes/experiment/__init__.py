"""What recipes/train.py and recipes/evaluate.py share: settings, texts, training, reports. No arithmetic.

Import it before torch: OpenMP reads its environment when it is loaded. By default its threads burn their cores while
they wait for each other, which makes a step ten times slower where another program uses one of the cores.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
