"""From a registration to a plan: layout into shards, placement on servers. Pure conversion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from paradis.core.codes import choose_codec, code_bytes, recompresses
from paradis.core.colocation import split
from paradis.core.layout import LayoutConfig, ParameterInfo, build, element_bytes
from paradis.core.placement import Item, place
from paradis.settings import SharedSettings
from paradis.wire import messages as msg


def weigh_servers(servers: Sequence[str], beside: int) -> dict[str, float]:
    """Return the weight in placement of each server; their mean is 1.

    Args:
        servers: names, the dedicated ones first.
        beside: how many of them are co-located, one with each worker; 0: all weigh the same.

    Raises:
        ConfigError: there are so many dedicated servers that co-located ones would own nothing.
    """
    if not beside:
        return dict.fromkeys(servers, 1.0)
    dedicated = len(servers) - beside
    shares = split(beside, dedicated)
    # A server of weight 1 has the usual number of points on the ring.
    weights = (len(servers) * shares.dedicated, len(servers) * shares.colocated)
    return {name: weights[i >= dedicated] for i, name in enumerate(servers)}


def _info(
    spec: msg.ParameterSpec, register: msg.Register, settings: SharedSettings
) -> ParameterInfo:
    numel, codec = math.prod(spec.shape), ""
    if spec.options_group >= 0:
        codec = choose_codec(
            register.compression or settings.compression, register.optimizer, spec.dtype, numel,
            threshold=settings.compression_elements_min,
            scale=str(register.options[spec.options_group].get("scale", "l1")),
        )  # fmt: skip
    return ParameterInfo(
        spec.name, numel, spec.dtype, element_bytes(spec.dtype), spec.options_group, codec
    )


def make_plan(
    register: msg.Register,
    settings: SharedSettings,
    servers: Mapping[str, float],
    *,
    generation: int,
    first_parameter: int,
    first_shard: int,
    placed: Sequence[msg.ShardPlan] = (),
) -> msg.Plan:
    """Return the plan of one registered part.

    Args:
        register: what the workers agreed on.
        servers: name -> weight of every server.
        first_parameter: index of the part's first parameter within the group.
        first_shard: number of the part's first shard.
        placed: shards placed before, which count as load.
    """
    infos = [_info(p, register, settings) for p in register.parameters]
    config = LayoutConfig(
        shard_bytes=settings.shard_bytes,
        bucket_bytes=settings.bucket_bytes,
        bucket_small_bytes=settings.small_tensor_bytes,
    )
    layout = build(infos, config, group=register.group, part=register.part,
                   first_parameter=first_parameter)  # fmt: skip
    items = [Item(s.key, layout.bytes_of(s)) for s in layout.shards]
    before = {f"shard {s.shard}": s for s in placed}
    items += [Item(k, s.length * element_bytes(s.dtype)) for k, s in before.items()]
    decisions = place(
        items,
        servers,
        settings.load_epsilon,
        fixed={k: s.server for k, s in before.items()},
    )
    shards = tuple(
        msg.ShardPlan(
            shard=first_shard + i,
            server=decisions[s.key].server,
            dtype=s.dtype,
            length=s.length,
            segments=tuple(
                msg.Segment(g.parameter, g.offset, g.length, g.start) for g in s.segments
            ),
            options_group=s.options_group,
            priority=first_shard + s.priority,
            codec=s.codec,
            code_bytes=sum(code_bytes(s.codec, g.length) for g in s.segments) if s.codec else 0,
            recompressed=settings.rack_codes == "recompress" and recompresses(s.codec),
        )
        for i, s in enumerate(layout.shards)
    )
    return msg.Plan(
        generation=generation, group=register.group, part=register.part,
        first_parameter=first_parameter, parameters=register.parameters,
        optimizer=register.optimizer, options=register.options, shards=shards,
        step=register.step, restore="" if register.step else settings.restore,
        coded_from=register.coded_from, coded_until=register.coded_until,
        mode=mode_of(settings), staleness=settings.staleness, scaling=settings.staleness_scaling,
        backup=settings.backup_workers if mode_of(settings) == "sync" else 0,
    )  # fmt: skip


def mode_of(settings: SharedSettings) -> str:
    """Return the mode of a group: ``ssp`` in which nobody may be ahead is ``sync``."""
    return "sync" if settings.mode == "ssp" and not settings.staleness else settings.mode
