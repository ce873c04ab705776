"""The core's own names for NumPy's functions give what NumPy's give."""

import numpy as np
import pytest

from specsampling import _numpy
from specsampling._arrays import namespace

FLOATS = np.array([[3.0, -1.0, 2.0], [2.0, np.inf, -0.0]], dtype=np.float32)
ARRAYS = [FLOATS, FLOATS.astype(np.float64)[:, ::-1], np.array([[2, -1], [3, 3]], dtype=np.int32), FLOATS > 0]
IDS = ["float32", "float64, strided", "int32", "bool"]


def same(got, expected):
    assert type(got) is type(expected)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["all", "any", "max", "min", "sum"])
@pytest.mark.parametrize("x", ARRAYS, ids=IDS)
@pytest.mark.parametrize("axis", [None, 0, -1])
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions(name, x, axis, keepdims):
    options = {"axis": axis, "keepdims": keepdims}
    same(getattr(_numpy, name)(x, **options), getattr(np, name)(x, **options))


@pytest.mark.parametrize("name", ["sum", "cumulative_sum", "cumulative_prod"])
@pytest.mark.parametrize("x", ARRAYS, ids=IDS)
@pytest.mark.parametrize("dtype", [None, np.float64, np.int64])
def test_sums_and_products_in_a_dtype(name, x, dtype):
    x = np.nan_to_num(x, posinf=4)
    same(getattr(_numpy, name)(x, axis=1, dtype=dtype), getattr(np, name)(x, axis=1, dtype=dtype))


@pytest.mark.parametrize("x", ARRAYS, ids=IDS)
def test_the_other_functions(x):
    same(_numpy.argmax(x, axis=1), np.argmax(x, axis=1))
    same(_numpy.argmax(x, axis=0, keepdims=True), np.argmax(x, axis=0, keepdims=True))
    same(_numpy.astype(x, np.float64), np.astype(x, np.float64))
    same(_numpy.clip(x, 0, 2), np.clip(x, 0, 2))
    same(_numpy.full_like(x, 1), np.full_like(x, 1))
    same(_numpy.full_like(x, -1, dtype=np.int64), np.full_like(x, -1, dtype=np.int64))
    same(_numpy.take(x, np.array([1, 0, 1]), axis=0), np.take(x, np.array([1, 0, 1]), axis=0))
    same(_numpy.zeros_like(x), np.zeros_like(x))
    same(_numpy.zeros_like(x, dtype=np.int8), np.zeros_like(x, dtype=np.int8))
    for axis in (0, 1, 2, -1, -2):
        same(_numpy.stack([x, x[::-1]], axis=axis), np.stack([x, x[::-1]], axis=axis))
    assert _numpy.astype(x, x.dtype, copy=False) is x
    assert _numpy.astype(x, x.dtype) is not x
    for kind in ("bool", "integral", "real floating", "numeric", np.int32):
        assert _numpy.isdtype(x.dtype, kind) == np.isdtype(x.dtype, kind)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_bounds_may_lie_outside_the_dtype(dtype):
    x = np.array([0, 100], dtype=dtype)
    same(_numpy.clip(x, 1, 300), np.clip(x, 1, 300))
    same(_numpy.clip(x, -300, 50), np.clip(x, -300, 50))


def test_unsigned_integers_are_integral():
    assert _numpy.isdtype(np.dtype(np.uint8), "integral")


def test_all_other_names_are_numpys():
    xp = namespace(FLOATS)
    assert xp is _numpy
    assert xp.where is np.where
    with pytest.raises(AttributeError):
        _ = xp.no_such_function
