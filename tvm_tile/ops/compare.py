"""Results of an op against its reference."""

from __future__ import annotations

__all__ = ["compare"]


def compare(outputs, expected, tolerance) -> tuple[bool, list[dict]]:
    """Largest error of each output against the reference, and whether all are within the tolerance.

    An element is right when ``|x - r| <= atol + rtol * |r|``; infinities must be the same, NaN is right only where the
    reference has it.

    Parameters
    ----------
    outputs, expected : list of torch.Tensor
        Results and reference.
    tolerance : (float, float)
        rtol and atol.
    """
    import torch

    rtol, atol = tolerance
    reports, good = [], True
    for have, want in zip(outputs, expected, strict=True):
        # where the reference is: on a GPU these are milliseconds
        r = want.detach().to(torch.float64)
        x = have.detach().to(r.device, torch.float64)
        if x.shape != r.shape:
            reports.append({"passed": False, "error": f"shape {tuple(x.shape)}, expected {tuple(r.shape)}"})
            good = False
            continue
        same = (x == r) | (torch.isnan(x) & torch.isnan(r))
        difference = torch.where(same, torch.zeros_like(x), (x - r).abs())
        limit = atol + rtol * torch.where(torch.isfinite(r), r.abs(), torch.zeros_like(r))
        right = same | (difference <= limit)
        finite = difference[torch.isfinite(difference)]
        worst = float(finite.max()) if finite.numel() else 0.0
        scale = float(r[torch.isfinite(r)].abs().max()) if torch.isfinite(r).any() else 0.0
        wrong = int((~right).sum())
        reports.append(
            {
                "passed": wrong == 0,
                "max_abs_error": worst,
                "max_rel_error": worst / scale if scale else worst,
                "wrong_elements": wrong,
                "elements": x.numel(),
            }
        )
        good = good and wrong == 0
    return good, reports
