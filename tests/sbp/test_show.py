import pytest

import sbp

SQUARE = sbp.placement("cpu", [[0, 1], [2, 3]])


def picture(signature, shape=(16, 8), placement=SQUARE):
    x = sbp.zeros(shape, placement=placement, sbp=sbp.parse(signature))
    return str(sbp.show(x))


def test_split_both_ways():
    assert picture("S(0),S(1)") == (
        "float32[16@x,8@y]: (S(0), S(1)) on cpu [[0, 1], [2, 3]]\n"
        "\n"
        "       0:4   4:8\n"
        "     +-----+-----+\n"
        " 0:8 |  0  |  1  |\n"
        "     +-----+-----+\n"
        "8:16 |  2  |  3  |\n"
        "     +-----+-----+\n"
        "\n"
        "rank   0  part [0:8, 0:4]   local shape (8, 4)\n"
        "rank   1  part [0:8, 4:8]   local shape (8, 4)\n"
        "rank   2  part [8:16, 0:4]  local shape (8, 4)\n"
        "rank   3  part [8:16, 4:8]  local shape (8, 4)"
    )


@pytest.mark.parametrize(
    ("signature", "cells"),
    [
        ("B,B", ["| 0, 1, 2, 3 |"]),
        ("P,P", ["| 0 + 1 + 2 + 3 |"]),
        ("B,P", ["| (0, 2) + (1, 3) |"]),
        ("S(0),P", ["| 0 + 1 |", "| 2 + 3 |"]),
        ("B,S(0)", ["| 0, 2 |", "| 1, 3 |"]),
        ("S(1),S(1)", ["|  0  |  1  |  2  |  3  |"]),
    ],
)
def test_replicas_and_addends_share_a_box(signature, cells):
    lines = picture(signature).splitlines()
    assert [line[line.index("|") :] for line in lines if "|" in line] == cells


def test_order_of_ranks_shows():
    lines = picture("S(0)", (4,), sbp.placement("cpu", [6, 2])).splitlines()
    assert [line for line in lines if "|" in line] == ["0:2 | 6 |", "2:4 | 2 |"]


def test_scalars_have_no_drawing_and_cubes_fold_their_columns():
    assert "|" not in picture("B,P", ())
    cube = sbp.placement("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    assert "0:4, 0:1" in picture("S(0),S(1),S(2)", (16, 8, 2), cube)


def test_notebooks_get_a_drawing_and_a_table():
    x = sbp.zeros((16, 8), placement=SQUARE, sbp=sbp.parse("S(0),P"))
    page = sbp.show(x)._repr_html_()
    assert page.count("<rect") == 2
    assert "0 + 1" in page
    assert page.count("<tr>") == 5
    assert "&#" not in page.replace("&#x27;", "")
    assert repr(sbp.show(x)) == str(sbp.show(x))
