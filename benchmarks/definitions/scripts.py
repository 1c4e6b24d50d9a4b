"""Benchmarks that run separate programs."""

from collections.abc import Sequence

from benchmarks.benchmark import Result, Script, Verdict
from benchmarks.gpu import page

IDEAL = {("interleaved", 4, 2, 8): 0.82, ("zero_bubble", 4, 4, 8): 0.95}
"""Schedule, ranks, stages per rank and micro-batches → smallest share of a step in which ranks should not wait."""


def _bubble(result: Result) -> Sequence[Verdict]:
    found = []
    for row in result["rows"]:
        case = (row["schedule"], row["ranks"], row["chunks"], row["micro_batches"])
        name = f"{case[0]}, {case[1]} × {case[2]} stages, {case[3]} micro-batches"
        pace = row["predicted_step_s"] / row["measured_step_s"]
        found.append(Verdict(f"{name}: at least 0.95 of the schedule's pace", f"{pace:.3f}", pace >= 0.95))
        if case in IDEAL:
            busy = 1 - row["measured_bubble"]
            aim = f"{name}: at least {IDEAL[case]} of a step without waiting"
            found.append(Verdict(aim, f"{busy:.3f}", busy >= IDEAL[case]))
    return found


def _chaos(result: Result) -> Sequence[Verdict]:
    lost = result["unloadable"]
    found = f"{result['kills']} kills, {lost} unloadable"
    return [Verdict("no kill costs more than the save that it hits", found, lost == 0)]


def _effective(result: Result) -> Sequence[Verdict]:
    share = result["of_the_ideal"]
    found = f"{share:.1%} of the ideal, {result['effective']:.1%} of the time; {result['kills']} kills"
    return [Verdict("at least 95% of the ideal for the interval and the kills", found, share >= 0.95)]


def _guard(result: Result) -> Sequence[Verdict]:
    tried, caught = result["tried"], result["tried"]["caught"]["guard"]
    skipped = tried["skipped"]
    aims = [
        Verdict(
            f"no update skipped in {tried['runs']} healthy runs",
            f"{skipped['guard']} of {tried['steps']:,}; by six standard deviations {skipped['6 deviations']}",
            skipped["guard"] == 0,
        )
    ]
    for kind in ("random targets", "random bytes", "gradient × 100"):
        found, of = caught[kind]
        aims.append(Verdict(f"every one caught: {kind}", f"{found} of {of}", found == of))
    return aims


def _verify(result: Result) -> Sequence[Verdict]:
    certified = sum(plan["certified"] for plan in result["plans"])
    found = f"{certified} of {len(result['plans'])} plans, {len(result['refused'])} refused"
    return [Verdict("every plan that is not refused trains the same run", found, certified == len(result["plans"]))]


def _slow_network(result: Result) -> Sequence[Verdict]:
    return [
        Verdict(
            f"{row['plan']}: a step within 15% of the prediction",
            f"{row['measured_step_s']:.2f} s, predicted {row['predicted_step_s']:.2f} s; "
            f"{row['measured_hidden']:.0%} of the communication hidden, predicted {row['predicted_hidden']:.0%}",
            abs(row["step_error"]) <= 0.15,
        )
        for row in result["rows"]
    ]


GPU = Script(
    "gpu",
    "On a GPU",
    "What one GPU computes, how fast, and in how much memory, beside what was predicted; more in "
    "[docs/reference/gpu.md](../docs/reference/gpu.md).",
    ("python", "-m", "benchmarks", "gpu"),
    page.verdicts,
    minutes=9,
    needs_gpu=True,
)
PIPELINE = (
    Script(
        "bubble",
        "The pipeline's efficiency",
        "Each schedule with stages that sleep, compared with the waits that it plans.",
        ("python", "benchmarks/bubble.py"),
        _bubble,
        minutes=7,
    ),
)
OTHERS = (
    Script(
        "slow_network",
        "Communication that is hidden",
        "Four ranks on two hosts, network namespaces joined by a slow cable, with layers that sleep: the "
        "seconds that each strategy waits for the network, compared with the prediction.",
        ("python", "benchmarks/slow_network.py"),
        _slow_network,
        minutes=6,
    ),
    Script(
        "chaos",
        "Killed saves and runs",
        "Saves and whole runs are killed at random moments; more in "
        "[docs/guides/checkpoints.md](../docs/guides/checkpoints.md).",
        ("python", "benchmarks/chaos.py", "--kills", "500"),
        _chaos,
        minutes=25,
    ),
    Script(
        "effective_time",
        "Effective time under kills",
        "The time of a run's steps without disturbance, divided by the wall time of a run whose workers are killed "
        "and restarted; more in [docs/guides/faults.md](../docs/guides/faults.md).",
        ("python", "benchmarks/effective_time.py"),
        _effective,
        minutes=18,
    ),
    Script(
        "guard",
        "Healthy updates skipped, spikes caught",
        "The guard's rule on healthy runs of small batches that were not used to set it, and on corrupted ones; more "
        "in [docs/guides/guard.md](../docs/guides/guard.md).",
        ("python", "benchmarks/guard.py"),
        _guard,
        minutes=30,
    ),
    Script(
        "verify_tiny",
        "Every strategy, the same run",
        "All plans of `recipes/tiny.py:verify` on four ranks, compared with plain PyTorch; more in "
        "[docs/guides/verify.md](../docs/guides/verify.md).",
        ("llmtrain", "verify", "recipes/tiny.py", "--nproc", "4", "--json"),
        _verify,
        minutes=25,
        prints_result=True,
    ),
)
