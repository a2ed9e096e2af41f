"""A new public name or option is a decision, not an accident: it is entered here."""

import inspect

import pytest

import jzero

# Public name: its parameters. None for a name that is not called, such as a module.
PUBLIC: dict[str, str | None] = {
    "DistributedDataParallel": (
        "model mesh axis init_sync bucket_cap_mb find_unused_parameters average_in_collective "
        "static_graph grad_reduce_dtype variables replica_axis average buffers first_bucket_mb wrt"
    ),
    "DynamicLossScale": "initial growth_factor backoff_factor growth_interval minimum hysteresis",
    "GradShards": "buckets layout axis",
    "LocalGrads": "leaves paths",
    "MultiSteps": "tx steps",
    "MultiStepsState": "micro_step grads inner",
    "ParamShards": "buckets frozen others probes plan config weighted",
    "Precision": ("state grad_sync param_sync master accumulate scaled rounding seed overrides"),
    "Report": "topology devices mesh chip methods largest_batch largest_depth",
    "ZeroConfig": "axis replica_axis mesh bucket_mb average param_sync stacked precision",
    "ZeroState": "step grad_norm skipped finite master inner layout axis sharded",
    "ZeroTransformation": "machine",
    "accumulate": "loss_fn steps sync has_aux weighted zero",
    "adamw": (
        "learning_rate b1 b2 eps eps_root weight_decay mask nesterov bias_correction "
        "weight_decay_mode clip_norm skip_nonfinite param_labels overrides zero"
    ),
    "checkpoint": None,
    "compiler_options": (
        "zero platform merge_mb pipelined user_buffers command_buffers double_buffering"
    ),
    "distributed": None,
    "broadcast": "tree zero",
    "first_difference": "tree zero",
    "gather_params": "shards",
    "global_norm": "tree paths ord zero",
    "partition_specs": "tree",
    "report": (
        "fn_or_tx params topology loss batch args in_specs stacked mesh_shape compare baseline "
        "compiler_options largest_batch largest_depth"
    ),
    "save_except_gathered": "prim _ params",
    "save_gathered": "prim _ params",
    "scan_layers": "body carry shards args",
    "shard_params": "params zero stacked",
    "value_and_grad": "loss_fn argnums has_aux weighted zero",
    "zero": "inner clip_norm skip_nonfinite param_labels overrides zero",
}

EXPORTED: list[str] = sorted(getattr(jzero, "__all__", []))


def parameters(name: str) -> str | None:
    """The parameters of a public name, as the table above writes them."""
    value = getattr(jzero, name)
    return " ".join(inspect.signature(value).parameters) if callable(value) else None


def test_the_public_names_are_these():
    assert sorted(PUBLIC) == EXPORTED, "enter the decision in PUBLIC"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_parameters_are_these(name: str):
    assert parameters(name) == PUBLIC[name]


@pytest.mark.parametrize("name", EXPORTED)
def test_every_public_name_is_explained(name: str):
    value = getattr(jzero, name)
    assert (value.__doc__ or "").strip()
    # A dataclass without a docstring gets its signature as one.
    assert not value.__doc__.startswith(f"{name}(")
