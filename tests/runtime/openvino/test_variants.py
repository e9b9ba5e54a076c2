"""Graphs by their sizes: what is compiled, when, and what is remembered. No OpenVINO is needed."""

import threading

import pytest

from eagle_fsd.runtime.openvino.variants import AGAIN, FIRST, OFTEN, START, SWITCH, Variants

OPEN = "open"


class Compiler:
    """Compiles names of graphs. While `gate` is shut, graphs of known sizes take for ever."""

    def __init__(self) -> None:
        self.made = []
        self.gate = threading.Event()
        self.gate.set()
        self.error = None

    def __call__(self, sizes):
        if sizes is None:
            return OPEN
        self.gate.wait(10)
        self.made.append((sizes, threading.current_thread()))
        if self.error is not None:
            raise self.error
        return sizes


@pytest.fixture
def compiler():
    return Compiler()


def test_sizes_that_come_again_get_a_graph(compiler):
    variants = Variants(compiler, most=2)
    assert [variants.choose((1, 8)) for _ in range(AGAIN + 1)] == [OPEN] * (AGAIN - 1) + [(1, 8)] * 2
    assert len(compiler.made) == 1


def test_a_large_graph_that_nobody_expected_is_compiled_beside_and_used_from_a_fixed_time_on(compiler):
    compiler.gate.clear()
    variants = Variants(compiler, most=2, large=True)
    assert [variants.choose((1, 8)) for _ in range(SWITCH - 1)] == [OPEN] * (SWITCH - 1)
    assert not compiler.made and (1, 8) in variants.compiled
    threading.Timer(0.05, compiler.gate.set).start()
    assert variants.choose((1, 8)) == (1, 8)  # it waits
    [(_, thread)] = compiler.made
    assert thread is not threading.current_thread() and not thread.daemon


def test_a_large_graph_that_is_ready_early_is_not_used_early(compiler):
    """So that no race decides. One that becomes expected meanwhile is used at once."""
    variants = Variants(compiler, most=2, large=True)
    for count in range(1, SWITCH - 1):
        assert variants.choose((1, 8)) == OPEN
        if count >= START:
            variants.compiled[1, 8].result(10)
    variants.expect((1, 8))
    assert variants.choose((1, 8)) == (1, 8) and len(compiler.made) == 1
    variants.expect((2, 8))
    assert variants.choose((2, 8)) == (2, 8)


def test_a_large_graph_that_cannot_be_made_is_done_without(compiler):
    """The open graph goes on, and the next attempt comes after as many uses."""
    compiler.error = RuntimeError("no memory")
    compiler.gate.clear()
    variants = Variants(compiler, most=2, large=True)
    assert {variants.choose((1, 8)) for _ in range(START)} == {OPEN}
    asked = variants.compiled[1, 8]
    compiler.gate.set()
    assert asked.exception(10) is compiler.error
    assert {variants.choose((1, 8)) for _ in range(START - 1)} == {OPEN} and not variants.compiled
    compiler.gate.clear()
    assert variants.choose((1, 8)) == OPEN and list(variants.compiled) == [(1, 8)]
    compiler.gate.set()


def test_where_there_are_most_graphs_only_frequent_sizes_replace_the_least_used(compiler):
    variants = Variants(compiler, most=2)
    for sizes in ((1, 8), (2, 8)):
        for _ in range(AGAIN):
            variants.choose(sizes)
    variants.choose((1, 8))  # so (2, 8) is the one that was not used for longest
    variants.expect((3, 8))
    assert [variants.choose((3, 8)) for _ in range(OFTEN)] == [OPEN] * (OFTEN - 1) + [(3, 8)]
    assert set(variants.compiled) == {(1, 8), (3, 8)}
    assert variants.choose((2, 8)) == OPEN


def test_sizes_that_are_measured_get_graphs_which_give_way_to_expected_sizes(compiler):
    variants = Variants(compiler, most=2)
    for sizes in ((1, 1), (2, 8), (1, 1), (3, 8)):
        variants.expect(sizes, again=False)
        assert variants.choose(sizes) == sizes
    assert len(variants.compiled) == 2
    for sizes in ((4, 8), (5, 8)):
        variants.expect(sizes)
        assert variants.choose(sizes) == sizes
    variants.expect((6, 8))
    assert set(variants.compiled) == {(4, 8), (5, 8)} and variants.choose((6, 8)) == OPEN
    variants.expect((7, 8), again=False)
    assert variants.choose((7, 8)) == (7, 8)


def test_sizes_that_were_measured_and_are_expected_do_not_give_way_to_others_that_are_measured(compiler):
    variants = Variants(compiler, most=3)
    variants.expect((1, 8), again=False)
    variants.expect((1, 8))
    for width in (2, 3, 4):
        variants.expect((1, width), again=False)
    assert set(variants.compiled) == {(1, 8), (1, 3), (1, 4)}


def test_two_sizes_that_are_measured_in_turn_both_have_graphs_whatever_was_kept(compiler):
    variants = Variants(compiler, most=2)
    variants.expect((1, 16))
    for width in (2, 3, 4, 6):
        for sizes in ((4, 1), (4, width)):
            variants.expect(sizes, again=False)
        assert [variants.choose(sizes) for sizes in ((4, 1), (4, width))] == [(4, 1), (4, width)]
    assert [sizes for sizes, _ in compiler.made].count((4, 1)) == 1


def test_sizes_that_are_only_measured_are_not_expected_in_the_next_process(compiler, tmp_path):
    variants = Variants(compiler, 4, tmp_path)
    variants.expect((1, 2), again=False)
    variants.expect((1, 8))
    assert variants.choose((1, 2)) == (1, 2)
    assert Variants(compiler, 4, tmp_path).compiled.keys() == {(1, 8)}


def test_expected_sizes_are_compiled_ahead_and_waited_for(compiler):
    compiler.gate.clear()
    variants = Variants(compiler, most=2)
    variants.expect((1, 8))
    assert not compiler.made and variants.choose((1, 5)) == OPEN  # nobody else waits
    threading.Timer(0.05, compiler.gate.set).start()
    assert variants.choose((1, 8)) == (1, 8)
    variants.expect((1, 8))
    [(_, thread)] = compiler.made
    assert thread is not threading.current_thread() and not thread.daemon


def test_an_error_is_raised_where_the_graph_is_asked_for(compiler):
    compiler.error = RuntimeError("no memory")
    compiler.gate.clear()
    variants = Variants(compiler, most=2)
    variants.expect((1, 8))
    asked = variants.compiled[1, 8]
    compiler.gate.set()
    with pytest.raises(RuntimeError, match="no memory"):
        asked.result(10)
    compiler.error = None
    assert [variants.choose((1, 8)) for _ in range(AGAIN)][-1] == (1, 8)  # it is tried again


def test_an_error_is_told_to_who_waits_though_the_graph_gave_way_to_another(compiler):
    compiler.error = RuntimeError("no memory")
    compiler.gate.clear()
    variants = Variants(compiler, most=1)
    variants.expect((1, 8))
    asked = variants.compiled[1, 8]
    variants.expect((1, 4), again=False)
    assert (1, 8) not in variants.compiled
    compiler.gate.set()
    assert asked.exception(10) is compiler.error


def test_what_was_expected_first_is_compiled_in_the_next_process(compiler, tmp_path):
    variants = Variants(compiler, 4, tmp_path)
    for _ in range(AGAIN):
        variants.choose((1, 5))  # measured in passing
    for nodes in (8, 16):
        variants.expect((1, nodes))
    later = Compiler()
    assert Variants(later, 4, tmp_path).choose((1, 8)) == (1, 8)
    assert [sizes for sizes, _ in later.made] == [(1, 8)]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"sizes": []}', '{"sizes": [true]}', '{"sizes": [1, "8"]}', '{"sizes": [0]}']
)
def test_a_damaged_note_is_ignored(compiler, tmp_path, text):
    (tmp_path / FIRST).write_text(text)
    assert Variants(compiler, 4, tmp_path).compiled == {}


def test_notes_that_cannot_be_written_are_left_out(compiler, tmp_path):
    variants = Variants(compiler, 4, tmp_path / "gone")
    variants.expect((1, 8))
    assert variants.choose((1, 8)) == (1, 8)


def test_a_graph_without_copies_serves_all_sizes(compiler, tmp_path):
    """Also where sizes are expected, or were in the last process."""
    (tmp_path / FIRST).write_text('{"sizes": [1, 4]}')
    variants = Variants(compiler, most=0, folder=tmp_path, large=True)
    variants.expect((1, 8))
    variants.expect((1, 2), again=False)
    assert {variants.choose((1, 8)) for _ in range(OFTEN + SWITCH)} == {OPEN}
    assert not variants.compiled and not compiler.made
