"""`import bertsmith` is quick and gives every name it promises."""

import subprocess
import sys

import bertsmith


def test_every_promised_name_is_there() -> None:
    assert set(bertsmith._HOMES) | {"__version__"} == set(bertsmith.__all__)
    for name in bertsmith.__all__:
        assert getattr(bertsmith, name) is not None
    assert not hasattr(bertsmith, "no_such_name")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, bertsmith; print(sorted({'torch', 'numpy', 'pyarrow', 'tokenizers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
