"""Reading compiled TPU programs: samples made here, in the form that the compiler writes."""

import pytest

from transformer_jax import hlo_text

PROGRAM = """HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %sum = f32[] add(%x, %x), backend_config={"estimated_cycles":"7"}
}

%fused (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %inner = f32[8,4]{1,0} dot(%p, %p), backend_config={"estimated_cycles":"1000"}
}

%all-reduce-scatter.1 (p: f32[16,4]) -> f32[1,4] {
  %p = f32[16,4]{1,0} parameter(0)
  %whole = f32[16,4]{1,0} all-reduce(%p), channel_id=5, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %part = f32[1,4]{1,0} slice(%whole)
}

%kernel_body (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %k = f32[2]{0} custom-call(%p), custom_call_target="tpu_custom_call", backend_config={"body":"
module {
  }
"}
  ROOT %n = s32[] add(%p, %p), backend_config={"estimated_cycles":"3"}
}

%inner_body (p: u32[]) -> u32[] {
  %p = u32[] parameter(0)
  %cp = (bf16[4,2]{1,0}, bf16[4,2]{1,0}, u32[]) collective-permute-start(%p), channel_id=9, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  ROOT %n = u32[] add(%p, %p), backend_config={"estimated_cycles":"10"}
}

%inner_condition (p: u32[]) -> pred[] {
  %limit = u32[]{:T(128)} constant(8), metadata={op_name="loop"}
  ROOT %less = pred[] compare(%p, %limit), direction=LT
}

%outer_body (p: s32[]) -> s32[] {
  %w = u32[] while(%p), condition=%inner_condition, body=%inner_body
  ROOT %n = s32[] add(%p, %p), backend_config={"estimated_cycles":"18446744073709551615"}
}

%condition (p: s32[]) -> pred[] {
  ROOT %less = pred[] compare(%p, %p), direction=LT
}

ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %f = f32[8,4]{1,0} fusion(%a), kind=kOutput, calls=%fused, metadata={op_name="layer/dot"}, backend_config={"estimated_cycles":"100"}
  %l = s32[] while(%a), condition=%condition, body=%outer_body, backend_config={"known_trip_count":{"n":"3"}}
  %k = s32[] call(%l), to_apply=%kernel_body
  %rs = f32[1,4]{1,0} fusion(%a), calls=%all-reduce-scatter.1
  %ag = f32[16,4]{1,0} all-gather(%rs), channel_id=6, replica_groups=[2,4]<=[8], frontend_attributes={async_collective_name="all-gather-start"}
  %ag2 = f32[16,4]{1,0} all-gather(%rs), channel_id=6, replica_groups=[2,4]<=[8]
  %ar = (f32[10]{0}, bf16[10]{0}) all-reduce(%a, %a), channel_id=7, replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}, to_apply=%add
  %s = (f32[100]{0}, u32[], token[]) send(%a), channel_id=8, is_host_transfer=true
  ROOT %out = f32[8,4]{1,0} sort(%a)
}
"""  # noqa: E501


def test_cycles_count_loops_as_often_as_they_run_and_fusions_once():
    """100 for the fusion, 3 for what is called, and 3 x 8 x 10 for the loop in the loop, whose counter is unsigned."""
    schedule = hlo_text.read(PROGRAM)
    assert schedule.cycles == 100 + 3 + 3 * 8 * 10
    assert schedule.by_name["layer/dot"] == 100


def test_what_has_no_price_is_listed_and_an_unknown_price_is_not_added():
    unpriced = hlo_text.read(PROGRAM).unpriced
    assert unpriced == {"custom-call:tpu_custom_call": 1, "fusion": 1, "sort": 1}


def test_collectives_are_counted_once_a_channel_with_bytes_group_and_what_is_started_ahead():
    found = {c.kind: c for c in hlo_text.read(PROGRAM).collectives}
    assert found["all-gather"] == hlo_text.Collective("all-gather", 4, 1, 256, 1, 256)
    assert found["all-reduce"] == hlo_text.Collective("all-reduce", 8, 1, 60, 0, 0)
    assert found["reduce-scatter"] == hlo_text.Collective("reduce-scatter", 4, 1, 256, 0, 0)
    assert found["collective-permute"] == hlo_text.Collective("collective-permute", 4, 24, 24 * 16, 24, 24 * 16)
    assert found[hlo_text.CROSS_SLICE].bytes == 400
    assert len(found) == 5


@pytest.mark.parametrize(
    "text,size",
    [
        ("replica_groups=mesh['axis_0'=16,'axis_1'=4] {'axis_0'}", 16),
        ("replica_groups=mesh['axis_0'=16,'axis_1'=4] device_ids=[64]<=[4,16] {'axis_0','axis_1'}", 64),
        ("replica_groups=[16,32]<=[512]", 32),
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("source_target_pairs={{0,1},{1,0}}", 2),
        ("to_apply=%add", 0),
    ],
)
def test_the_size_of_a_group_is_read_in_every_form(text, size):
    assert hlo_text.group_size(text) == size


def test_a_ring_moves_an_all_reduce_twice_and_the_rest_once():
    def moved(kind, **more):
        return hlo_text.ring_bytes(hlo_text.Collective(kind, 4, 1, 400.0, 0, 100.0), **more)

    assert moved("all-reduce") == 600
    assert moved("all-gather") == moved("reduce-scatter") == 300
    assert moved("collective-permute") == 400
    assert moved("all-gather", ahead=True) == 75
    assert moved("all-gather", ahead=False) == 225


EARLY = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (18.98G) exceeds "
    "available HBM (15.75G)."
)
LATE = """RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out of memory in memory
space hbm. Used 15.78G of 15.75G hbm. Exceeded hbm capacity by 32.91M.

  Largest program allocations in hbm:

  1. Size: 2.00G
     Shape: f32[16,1024]{1,0:T(8,128)}
     Unpadded size: 2.00G

  2. Size: 512.0M
     Operator: op_name="jit(step)/encoder/dot_general"
     Shape: bf16[8,1024]{1,0}
"""


def test_a_refusal_for_memory_is_read_in_both_of_its_forms():
    early, late = hlo_text.shortage(EARLY), hlo_text.shortage(LATE)
    assert early is not None and late is not None
    assert (early.needed, early.available, early.whole) == (18.98 * 2**30, 15.75 * 2**30, False)
    assert (late.needed, late.available, late.whole) == (15.78 * 2**30, 15.75 * 2**30, True)
    assert late.largest == ("2.00G f32[16,1024]{1,0:T(8,128)}", "512.0M jit(step)/encoder/dot_general")
    assert hlo_text.shortage("INTERNAL: something else") is None


def test_involuntary_rematerialisations_are_found_among_other_lines():
    said = "W0 [SPMD] Involuntary full rematerialization. The compiler cannot go from {a} to {b}\nanother line\n"
    assert hlo_text.rematerializations(said) == [said.splitlines()[0]]
    assert hlo_text.rematerializations("another line") == []
