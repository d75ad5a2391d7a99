"""The public names of `sbp`: whoever adds or removes one says so here."""

import inspect

import sbp

NAMES = """
Component Explanation FallbackWarning Placement Plan Signature add arange astype
balanced_sizes balanced_slices broadcast concatenate constrain divide einsum
embedding empty empty_like exp expand_dims explain eye from_local full full_like
full_value gelu getitem hann_window init is_global jit layer_norm linspace
log_softmax logspace matmul max mean min multiply negative normal ones ones_like
pad_to padded_shape padding_mask parse partial_sum placement placement_of plan rand
randint randn randperm relu reshape show signature_of softmax split squeeze subtract
sum tanh tensor to_global to_local transpose unpad where zeros zeros_like
""".split()


def test_public_names_are_these():
    found = [
        name
        for name, value in vars(sbp).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    ]

    assert sorted(found) == sorted(NAMES)


def test_every_public_function_and_class_says_what_it_is():
    for name in NAMES:
        value = getattr(sbp, name)
        if callable(value):
            assert inspect.getdoc(value), name
