import pickle
import subprocess
import sys

import numpy as np
import pytest

import sbp
from sbp import signature


def test_components_are_values_that_return_themselves_when_called():
    for component in (sbp.split(0), sbp.split(-1), sbp.broadcast, sbp.partial_sum):
        assert component() is component
        assert pickle.loads(pickle.dumps(component)) == component
        assert len({component, pickle.loads(pickle.dumps(component))}) == 1
    assert sbp.split(0) == sbp.split(np.int64(0)) != sbp.split(1)
    assert sbp.broadcast != sbp.partial_sum


def test_reprs_can_be_evaluated_and_short_forms_parsed():
    components = (sbp.split(0), sbp.split(-2), sbp.broadcast, sbp.partial_sum)
    assert repr(components) == (
        "(sbp.split(0), sbp.split(-2), sbp.broadcast, sbp.partial_sum)"
    )
    assert eval(repr(components), {"sbp": sbp}) == components
    assert signature.short(components) == "(S(0), S(-2), B, P)"
    assert sbp.parse(signature.short(components)) == components


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("S(0),B", (sbp.split(0), sbp.broadcast)),
        ("P", (sbp.partial_sum,)),
        (" ( S( 12 ) , P ) ", (sbp.split(12), sbp.partial_sum)),
        ("(B,)", (sbp.broadcast,)),
        ("S0,S1", (sbp.split(0), sbp.split(1))),
    ],
)
def test_parse_reads_the_short_form(text, expected):
    assert sbp.parse(text) == expected


@pytest.mark.parametrize("text", ["", "S", "S(x)", "B B", "S(0),,B", "broadcast"])
def test_parse_names_what_it_cannot_read(text):
    with pytest.raises(ValueError, match=r"is none of S\(dim\), B and P"):
        sbp.parse(text)


@pytest.mark.parametrize("dim", [0.0, "0", None, True, sbp.broadcast])
def test_split_takes_whole_numbers_only(dim):
    with pytest.raises(TypeError, match="takes the number of a dim, but got"):
        sbp.split(dim)


def test_resolve_fills_axes_that_a_mapping_leaves_out():
    names = ("stage", "data", "tensor")
    resolved = signature.resolve({"tensor": sbp.split(-1)}, names, ndim=2)
    assert resolved == (sbp.broadcast, sbp.broadcast, sbp.split(1))
    assert signature.resolve(sbp.split(-1), ("x",)) == (sbp.split(-1),)


def test_unknown_axis_gets_the_closest_name():
    with pytest.raises(ValueError, match="Did you mean 'tensor'") as error:
        signature.resolve({"tensr": sbp.split(0)}, ("data", "tensor"))
    assert "axes ('data', 'tensor')" in str(error.value)


@pytest.mark.parametrize("given", [sbp.split(0), [], (sbp.broadcast,) * 3])
def test_wrong_number_of_components_names_both_lengths(given):
    count = 1 if given == sbp.split(0) else len(given)
    with pytest.raises(ValueError, match=f"has {count} component") as error:
        signature.resolve(given, ("data", "tensor"))
    assert "the placement has 2 axes ('data', 'tensor')" in str(error.value)
    assert "sbp=(sbp.split(0), sbp.broadcast)" in str(error.value)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("S(0)", r"sbp.parse\('S\(0\)'\)"),
        (["S(0)"], r"sbp.parse\('S\(0\)'\)"),
        ([sbp.split], r"sbp.split\(0\)"),
        (0, "of type int"),
        (None, "of type NoneType"),
    ],
)
def test_what_is_no_component_is_a_type_error_with_a_hint(given, hint):
    with pytest.raises(TypeError, match=hint):
        signature.resolve(given, ("x",))


@pytest.mark.parametrize(("dim", "ndim"), [(2, 2), (-3, 2), (0, 0)])
def test_dim_out_of_range_names_axis_and_range(dim, ndim):
    with pytest.raises(ValueError, match="'x' names a dim that a tensor of") as error:
        signature.resolve(sbp.split(dim), ("x",), ndim=ndim)
    remedy = "A scalar has no dim" if ndim == 0 else "Use a dim from -2 to 1"
    assert remedy in str(error.value)


def test_signature_module_imports_no_jax():
    path = signature.__file__
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('signature', {path!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['signature'] = module\n"
        "spec.loader.exec_module(module)\n"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
