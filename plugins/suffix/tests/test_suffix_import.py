"""What importing the plugin costs."""

import subprocess
import sys


def test_the_plugin_and_its_proposer_import_no_torch():
    code = (
        "import sys; import specdec_suffix.plugin; light = set(sys.modules); import specdec_suffix.proposer; "
        "heavy = ('torch', 'transformers', 'arctic_inference'); "
        "print('numpy' in light, [m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "[]"]
