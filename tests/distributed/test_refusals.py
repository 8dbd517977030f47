"""Bad input ends the job before the model is built: exit code 2, one line that names the flag."""

import pytest

from tests.distributed.plugin_run import run_to_exit, train

PP2 = {"pipeline_model_parallel_size": 2, "train_iters": 1}
MOVES = {"dyn_rebalance": "auto"}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"dyn_rebalance": "sometimes"}, "--dyn-rebalance: expected off, auto, every:N or at:N1,N2, got 'sometimes'"),
        (
            {"dyn_layout_at": "3:Et*4|t*3L"},
            "--dyn-layout-at 3: layout 'Et*4|t*3L': places 7 layers, the model has 8 (1 unassigned)",
        ),
        ({"dyn_layout_at": "3:Et*4|t*2|t*2L"}, "3 stages cannot be spread over 2 pipeline stages"),
        ({"dyn_layout_at": "3:E|t*8L"}, "--dyn-allow-empty-stages"),
        ({"dyn_layout_at": "x"}, "--dyn-layout-at: expected N:LAYOUT, got 'x'"),
        ({"dyn_record_losses": True}, "--dyn-record-losses: needs --dyn-report-dir"),
        ({**MOVES, "dyn_profile_interval": 0}, "--dyn-profile-interval: expected at least 1, got 0"),
        ({**MOVES, "dyn_migrate_bucket_bytes": 0}, "--dyn-migrate-bucket-bytes: expected at least 1, got 0"),
        ({**MOVES, "dyn_shrink_policy": "throughput:1.5"}, "--dyn-shrink-policy: expected a TOL in [0, 1), got 1.5"),
        (
            {
                "dyn_rebalance": "auto",
                "mtp_num_layers": 1,
                "position_embedding_type": "rope",
                "pipeline_model_parallel_layout": "Et*8m|L",
            },
            "--dyn-rebalance: expected MTP layers (m) on the chunk of the loss (L), got chunk 0",
        ),
        ({**MOVES, "cuda_graph_impl": "local"}, "--cuda-graph-impl (CUDA graphs)"),
        ({**MOVES, "pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 2}, "a single pipeline stage"),
        (
            {
                "dyn_layout_at": "3:Et*8|mL",
                "mtp_num_layers": 1,
                "position_embedding_type": "rope",
                "pipeline_model_parallel_layout": "Et*4|t*4mL",
                "dyn_allow_empty_stages": True,
            },
            "--dyn-layout-at 3: with MTP the last decoder layer stays on stage 1",
        ),
        ({**MOVES, "dyn_rng_per_layer": True, "te_rng_tracker": True}, "--te-rng-tracker"),
    ],
)
def test_refused_at_start(flags, told):
    results = run_to_exit(2, train, **{**PP2, **flags})
    assert [result.exitcode for result in results] == [2, 2]
    lines = [line for line in results[0].output.splitlines() if line.startswith("megatron_dyn: error:")]
    assert len(lines) == 1
    assert told in lines[0]
    assert "building GPT model" not in results[0].output


def test_an_unknown_flag_is_refused():
    results = run_to_exit(2, train, **PP2, dyn_rebalence="auto")
    assert [result.exitcode for result in results] == [2, 2]
    assert "--dyn-rebalence" in results[0].output


def test_a_report_directory_that_cannot_be_written_is_refused(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    results = run_to_exit(2, train, **PP2, dyn_report_dir=str(blocker / "below"), dyn_record_losses=True)
    assert [result.exitcode for result in results] == [2, 2]
    assert "--dyn-report-dir" in results[0].output
