"""Registrations and hyper-parameters: agreement, and differences that a person can act on."""

from typing import Any

from paradis.core.registration import (
    LINES_MAX,
    RegisteredParameter,
    Registration,
    compare,
    compare_options,
)

W = RegisteredParameter("w", (3, 4), "float32", 0)
B = RegisteredParameter("b", (3,), "float32", 0)


def reg(
    rank: int,
    *parameters: RegisteredParameter,
    optimizer: str = "SGD",
    options: list[dict[str, Any]] | None = None,
) -> Registration:
    return Registration(rank, parameters, optimizer, options or [{"lr": 0.1}])


def lines(*registrations: Registration) -> list[str]:
    text = compare(registrations)
    assert text is not None
    head, *body, advice = text.splitlines()
    assert head == "workers registered different models:"
    assert advice == "build the same model and optimizer on every worker"
    return [line.strip() for line in body]


def test_agreement() -> None:
    assert compare([]) is None
    assert compare([reg(0, W)]) is None
    assert compare([reg(1, W, B), reg(0, W, B), reg(2, W, B)]) is None
    params = [reg(r, W, options=[{"lr": 1, "betas": (0.9, 0.99), "params": [r]}]) for r in (0, 1)]
    assert compare(params) is None


def test_missing_parameter_names_both_sides() -> None:
    assert lines(reg(0, W, B), reg(1, W), reg(2, W, B), reg(3, W, B)) == [
        "parameter 'b': registered by workers 0, 2-3, not by worker 1"
    ]


def test_every_aspect_is_compared() -> None:
    other = RegisteredParameter("w", (4, 4), "float64", 1, trainable=False)
    assert lines(reg(0, W), reg(1, other), reg(2, W)) == [
        "parameter 'w' shape: workers 0, 2 (3, 4), worker 1 (4, 4)",
        "parameter 'w' dtype: workers 0, 2 float32, worker 1 float64",
        "parameter 'w' options_group: workers 0, 2 0, worker 1 1",
        "parameter 'w' trainable: workers 0, 2 True, worker 1 False",
    ]


def test_another_order_is_refused() -> None:
    assert lines(reg(0, W, B), reg(1, B, W)) == [
        "order of parameters, first difference at position 0: worker 0 'w', worker 1 'b'"
    ]


def test_a_name_twice() -> None:
    assert "worker 1 registers a name twice: 'w'" in lines(reg(0, W), reg(1, W, W))


def test_optimizer_and_options() -> None:
    assert lines(
        reg(0, W, optimizer="Adam", options=[{"lr": 0.1, "eps": 1e-8}]),
        reg(1, W, options=[{"lr": 0.2}]),
    ) == [
        "optimizer: worker 0 Adam, worker 1 SGD",
        "group 0 lr: worker 0 0.1, worker 1 0.2",
        "group 0 eps: worker 0 1e-08, worker 1 not given",
    ]
    assert lines(reg(0, W), reg(1, W, options=[{"lr": 0.1}, {}])) == [
        "number of parameter groups: worker 0 1, worker 1 2"
    ]


def test_long_differences_are_counted() -> None:
    many = [RegisteredParameter(f"p{i}", (1,), "float32", 0) for i in range(LINES_MAX + 5)]
    body = lines(reg(0, *many), reg(1))
    assert len(body) == LINES_MAX + 1
    assert body[-1] == "... and 5 more"


def test_options_of_a_step() -> None:
    assert compare_options({0: [{"lr": 0.1}], 1: [{"lr": 0.1}]}) is None
    assert compare_options({}) is None
    assert compare_options({0: [{"lr": 0.1}], 1: [{"lr": 0.05}], 2: [{"lr": 0.1}]}) == (
        "learning rates differ: group 0 lr: workers 0, 2 0.1, worker 1 0.05; "
        "set the same values on every worker before step()"
    )
    text = compare_options({0: [{}, {"lr": 1, "eps": 1}], 1: [{}, {"lr": 2, "eps": 2}]})
    assert text is not None
    assert text.startswith("hyper-parameters differ: group 1 lr: worker 0 1, worker 1 2; group 1 e")


def test_long_option_differences_are_counted() -> None:
    text = compare_options({r: [{f"k{i}": r for i in range(LINES_MAX + 2)}] for r in (0, 1)})
    assert text is not None and "; ... and 2 more; set" in text


def test_values_compare_exactly_but_not_by_spelling() -> None:
    def differ(a: object, b: object) -> bool:
        return compare_options({0: [{"x": a}], 1: [{"x": b}]}) is not None

    nan = float("nan")
    assert not differ(1, 1.0) and not differ(nan, nan) and not differ((0.9, 1), [0.9, 1.0])
    assert not differ(None, None) and not differ(0, 0.0)
    assert differ(0.1, 0.1 + 2**-56) and differ(0.0, -0.0) and differ(True, 1)
    assert differ(None, False) and differ("1", 1) and differ([0.9], [0.9, 0.9])
