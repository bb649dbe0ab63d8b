"""How the warps (warpgroups) of a CTA split the output tile of a GEMM."""

from __future__ import annotations

from collections.abc import Callable

from .. import layout
from ..errors import TileTypeError

__all__ = ["GemmWarpPolicy", "policy_name"]


class GemmWarpPolicy:
    """Named warp policies.

    ``Square``: per-warp tiles as near as possible to square, for the real M x N. ``FullRow``: all warps along M.
    ``FullCol``: all warps along N. ``Tile64x64``: 64 x 64 a warp.
    """

    Square = "Square"
    FullRow = "FullRow"
    FullCol = "FullCol"
    Tile64x64 = "Tile64x64"

    @staticmethod
    def register(name: str, function: Callable) -> str:
        """Add a policy of your own.

        Parameters
        ----------
        name : str
            A Python identifier.
        function : callable
            ``(M, N, warps, instruction) -> (m_warps, n_warps)``; checked when a GEMM uses it.

        Returns
        -------
        str
            The name, to be passed as ``policy=``.

        Examples
        --------
        >>> def rows_first(m, n, warps, instruction):
        ...     return (min(warps, m // 16), warps // min(warps, m // 16))
        >>> T.GemmWarpPolicy.register("rows_first", rows_first)
        'rows_first'
        """
        layout.register_policy(name, function)
        return name


def policy_name(policy) -> str:
    """The name of a policy.

    Raises
    ------
    TileTypeError
        When there is none of that name.
    """
    known = layout.policy_names()
    if isinstance(policy, str) and policy in known:
        return policy
    raise TileTypeError(
        f"T.gemm: unknown warp policy {policy!r}",
        advice=f"one of {', '.join(f'T.GemmWarpPolicy.{n}' for n in ('Square', 'FullRow', 'FullCol', 'Tile64x64'))}, "
        "or a name registered with T.GemmWarpPolicy.register",
    )
