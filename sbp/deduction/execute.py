"""Runs a program on every device, inside a ``shard_map`` over all mesh axes."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from sbp.deduction.kernels import run_operation
from sbp.deduction.program import Conversion, Instruction, Program
from sbp.reshard import run_steps
from sbp.signature import Signature, broadcast

Shards = dict[tuple[int, Signature], jax.Array]


def run(program: Program, *arguments: jax.Array) -> list[jax.Array]:
    """Returns a device's shards of the results, given its shards of the arguments."""
    shards: Shards = {}
    everywhere = (broadcast,) * len(program.axes)
    for value, constant in program.region.constants.items():
        shards[value, everywhere] = constant
    pairs = zip(program.region.inputs, program.inputs, strict=True)
    shards.update(zip(pairs, arguments, strict=True))
    for instruction in program.instructions:
        _convert(program, instruction.conversions, shards)
        operation = instruction.operation
        pairs = zip(operation.inputs, instruction.inputs, strict=True)
        operands = [shards[pair] for pair in pairs]
        results = _run_instruction(program, instruction, operands)
        pairs = zip(operation.outputs, instruction.outputs, strict=True)
        shards.update(zip(pairs, results, strict=True))
    _convert(program, program.conversions, shards)
    pairs = zip(program.region.outputs, program.outputs, strict=True)
    return [shards[pair] for pair in pairs]


def _convert(
    program: Program, conversions: Sequence[Conversion], shards: Shards
) -> None:
    for c in conversions:
        shard = jax.numpy.asarray(shards[c.value, c.source])
        shards[c.value, c.target] = run_steps(shard, c.steps, program.axes)


def _run_instruction(
    program: Program, instruction: Instruction, operands: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    match instruction.operation.name:
        case "scan":
            return _run_scan(instruction, operands)
        case "while":
            return _run_while(instruction, operands)
        case "cond":
            branches = [_branch(body) for body in instruction.bodies]
            return lax.switch(operands[0], branches, *operands[1:])
    return run_operation(instruction, program.axes, operands)


def _run_scan(
    instruction: Instruction, operands: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    params, (body,) = instruction.operation.params, instruction.bodies
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, rest = operands[:num_consts], operands[num_consts:]

    def turn(carry: Sequence[Any], x: Sequence[Any]) -> tuple[Any, Any]:
        results = run(body, *consts, *carry, *x)
        return results[:num_carry], results[num_carry:]

    carry, ys = lax.scan(
        turn,
        list(rest[:num_carry]),
        list(rest[num_carry:]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _run_while(
    instruction: Instruction, operands: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    params, (condition, body) = instruction.operation.params, instruction.bodies
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    of_cond, rest = operands[:num_cond], operands[num_cond:]
    of_body, carry = rest[:num_body], list(rest[num_body:])
    return lax.while_loop(
        lambda carry: run(condition, *of_cond, *carry)[0],
        lambda carry: run(body, *of_body, *carry),
        carry,
    )


def _branch(body: Program) -> Any:
    return lambda *operands: run(body, *operands)
