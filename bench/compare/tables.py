"""Makes tables of compare.py's results: the verdict by target, ratios to peers, every program, and the plots.

`results` holds: "runs", the output of each run by "<model>/<ranks>/<program>"; "returning", the output of a run that returns
freed memory; "units", the output of a chain of units by "<wrapper>/<count>"; "machine"; "versions" of the peers; "rounds";
"rounds_without_ours", the rounds that measured another version of our library.
"""
import os
import statistics

MIB = 1 << 20

# name: (stage, description). Stages 1 and 2 compete: both shard the optimizer's state.
PROGRAMS = {
    "tessera local": (None, "one process a rank, each by itself"),
    "local": (None, "the same in Python"),
    "tessera ddp": (0, "Tessera DistributedDataParallel"),
    "ddp": (0, "PyTorch DDP, bucket views"),
    "tessera oss": (1, "Tessera DDP + OSS"),
    "tessera sdp": (2, "Tessera OSS + ShardedDataParallel"),
    "zero1": (1, "PyTorch DDP + ZeroRedundancyOptimizer, bucket views"),
    "fairscale_sdp": (2, "FairScale OSS + ShardedDDP"),
    "deepspeed1": (1, "DeepSpeed ZeRO 1"),
    "deepspeed2": (2, "DeepSpeed ZeRO 2"),
    "tessera fsdp": (3, "Tessera FullyShardedDataParallel"),
    "fsdp1": (3, "PyTorch FSDP1"),
    "fsdp2": (3, "PyTorch FSDP2"),
    "fairscale_fsdp": (3, "FairScale FSDP"),
    "deepspeed3": (3, "DeepSpeed ZeRO 3"),
}
STEPS = {"gpt": (8, 2), "gpt-512": (8, 2), "llama": (8, 2), "deep": (10, 3), "deep-768": (10, 3), "recipe": (5, 2),
         "recipe-2600": (5, 2), "mlp": (60, 10), "gpt2": (18, 2)}  # timed, warm-up
# The highest ratio of ours to the fastest peer of the stage.
TARGETS = {("tessera fsdp", "deep"): 0.5, ("tessera fsdp", "recipe"): 0.6, ("tessera fsdp", "gpt"): 0.85, ("tessera fsdp", "mlp"): 0.3,
           ("tessera sdp", "recipe"): 0.7, ("tessera sdp", "gpt"): 0.9, ("tessera sdp", "gpt-512"): 0.9, ("tessera fsdp", "llama"): 0.8,
           ("tessera sdp", "llama"): 0.9, ("tessera local", "llama"): 1.0}
OWN_TARGETS = {("tessera fsdp", "tessera ddp", "gpt"): 1.1}  # between our own wrappers
# By program: the exchange of its stage in bench/limits, and the highest ratio of ours to it.
LIMIT = "limits"
LIMIT_TARGETS = {"tessera fsdp": ("exchange_stage_1_and_3", 1.15), "tessera sdp": ("exchange_stage_0_and_2", 1.1)}
LIMITED = {model: LIMIT_TARGETS for model in ("deep", "recipe", "gpt")}
PLOTS_IN_A_ROW = 4
GROWTH_TARGET = 1.1  # growth of resident memory, relative to FSDP's memory report; only if that exceeds the runtime's own memory
GROWTH_MODELS = ("recipe", "recipe-2600")
UNIT_TARGET_MS, UNIT_GROWTH_TARGET = 0.1, 1.1  # processor time of a unit; its ratio between the most units and the fewest
# The relative tolerance of losses. In early steps they differ by rounding, since sums have another order. Adam divides by
# square roots near zero, so the difference grows a million times in ten steps of a deep model.
EARLY_STEPS, EARLY_TOLERANCE, LATE_TOLERANCE = 4, 1e-5, 2e-2


def good_runs(results, model, ranks, program):
    return [run for run in results["runs"].get(f"{model}/{ranks}/{program}", []) if "error" not in run]


def loss_problem(results, model, ranks, program):
    """The problem with a program's losses, compared with those of our DDP; None if they agree."""
    runs, reference = good_runs(results, model, ranks, program), good_runs(results, model, ranks, "tessera ddp")
    if not runs or not reference or PROGRAMS.get(program, (None,))[0] is None:
        return None
    for step, (loss, expected) in enumerate(zip(runs[0]["losses"], reference[0]["losses"])):
        if abs(loss - expected) > (EARLY_TOLERANCE if step < EARLY_STEPS else LATE_TOLERANCE) * max(abs(expected), 1e-2):
            return f"trains otherwise: loss {loss:.6g} in step {step + 1}, expected {expected:.6g}"
    return None


def peers_of(results, model, ranks, ours):
    stages = {None: (None,), 0: (0,), 1: (1, 2), 2: (1, 2), 3: (3,)}[PROGRAMS[ours][0]]
    found = []
    for program, (stage, _) in PROGRAMS.items():
        if stage in stages and not program.startswith("tessera") and good_runs(results, model, ranks, program):
            if loss_problem(results, model, ranks, program) is None:
                found.append(program)
    return found


def ratios(results, model, ranks, ours, peer, field):
    """The ratios of ours to the peer's, one for each round in which both ran."""
    theirs = {run["round"]: run[field] for run in good_runs(results, model, ranks, peer)}
    return [run[field] / theirs[run["round"]] for run in good_runs(results, model, ranks, ours) if run["round"] in theirs]


def median_of(results, model, ranks, program, field):
    values = [run[field] for run in good_runs(results, model, ranks, program)]
    return statistics.median(values) if values else None


def growth_mib(run):
    return (run["rss_peak_bytes"] - run["rss_before_bytes"]) / MIB


def held_mib(run):
    """The most memory that our wrappers and the optimizer report."""
    return sum(run[field] for field in ("param_bytes", "grad_bytes", "optimizer_bytes", "peak_gathered_bytes", "peak_bucket_bytes")) / MIB


def spread(values, digits=2):
    """The median, with the range if there are several values."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def cases(results):
    keys = sorted({tuple(key.split("/")[:2]) for key in results["runs"]}, key=lambda k: (int(k[1]), list(STEPS).index(k[0])))
    return [(model, int(ranks)) for model, ranks in keys]


def fastest_peer(results, model, ranks, ours):
    """The fastest of the peers that ran in a round with ours; --again leaves some out."""
    rounds = {run["round"] for run in good_runs(results, model, ranks, ours)}
    steps = {peer: [run["step_s_median"] for run in good_runs(results, model, ranks, peer) if run["round"] in rounds]
             for peer in peers_of(results, model, ranks, ours)}
    steps = {peer: statistics.median(values) for peer, values in steps.items() if values}
    return min(steps, key=steps.get) if steps else None


def least_growth(results, model, ranks, programs):
    grown = [statistics.median(growth_mib(run) for run in runs) for program in programs if (runs := good_runs(results, model, ranks, program))]
    return min(grown) if grown else None


def glance_table(results):
    """Ours over the fastest peer of the stage, and over the peer with the least memory, with the verdict."""
    columns = {"tessera fsdp": "FSDP", "tessera sdp": "OSS + SDP", "tessera ddp": "DDP", "tessera local": "one process"}
    lines = ["| step time, ours / the fastest peer's | " + " | ".join(columns.values()) + " | memory, FSDP / the least of its peers |",
             "| --- " * (len(columns) + 2) + "|"]
    for model, ranks in cases(results):
        cells = []
        for ours in columns:
            peer = fastest_peer(results, model, ranks, ours)
            values = ratios(results, model, ranks, ours, peer, "step_s_median") if peer else []
            if not values:
                cells.append("")
                continue
            goal = TARGETS.get((ours, model))
            cells.append(f"{statistics.median(values):.2f}{'' if goal is None else f' ({verdict(statistics.median(values), goal)})'}")
        own = least_growth(results, model, ranks, ["tessera fsdp"])
        theirs = least_growth(results, model, ranks, peers_of(results, model, ranks, "tessera fsdp"))
        cells.append(f"{own / theirs:.2f}" if own and theirs else "")
        lines.append(f"| {model}, {ranks} ranks | " + " | ".join(cells) + " |")
    return lines


def verdict(value, goal):
    return f"goal {goal}: {'met' if value <= goal else '**missed**'}"


def limit_ratios(results, model, ranks, ours, cpu):
    """The ratios of a step to computing and moving alone, measured in the same round."""
    exchange, _ = LIMIT_TARGETS[ours]
    kind = "_cpu_s" if cpu else "_s"
    least = {run["round"]: run["compute" + kind] + run[exchange + kind] for run in good_runs(results, model, ranks, LIMIT)}
    return [run["cpu_s" if cpu else "step_s_median"] / least[run["round"]]
            for run in good_runs(results, model, ranks, ours) if run["round"] in least]


def limit_rows(results):
    for model, ranks in cases(results):
        for ours, (_, goal) in LIMITED.get(model, {}).items():
            if times := limit_ratios(results, model, ranks, ours, cpu=False):
                cpu = limit_ratios(results, model, ranks, ours, cpu=True)
                yield (f"{PROGRAMS[ours][1]}, {model}, {ranks} ranks: step / (computing + moving)",
                       f"{spread(times)}; by processor time {spread(cpu)}", verdict(statistics.median(times), goal))


def growth_rows(results):
    for model, ranks in cases(results):
        runs = good_runs(results, model, ranks, "tessera fsdp") if model in GROWTH_MODELS else []
        if not runs:
            continue
        growth = least_growth(results, model, ranks, ["tessera fsdp"])
        over_held = growth / held_mib(runs[0])
        yield (f"FSDP, {model}, {ranks} ranks: growth of resident memory / held", f"{over_held:.2f}", verdict(over_held, GROWTH_TARGET))
        returning = [growth_mib(line) for peer in peers_of(results, model, ranks, "tessera fsdp")
                     if "error" not in (line := results.get("returning", {}).get(f"{model}/{ranks}/{peer}", {"error": ""}))]
        theirs = [least_growth(results, model, ranks, peers_of(results, model, ranks, "tessera fsdp")), *returning]
        if theirs := [value for value in theirs if value]:
            yield ("the same / the least of any peer's, with either setting of malloc", f"{growth / min(theirs):.2f}",
                   verdict(growth / min(theirs), 1))


def unit_costs_ms(results, wrapper):
    """Processor time of a rank per unit, by number of units, the fewest first."""
    costs = {}
    for key, lines in results.get("units", {}).items():
        good = [line["cpu_s"] for line in lines if "error" not in line]
        if key.startswith(wrapper + "/") and good:
            count = int(key.split("/")[1])
            costs[count] = statistics.median(good) * 1e3 / count
    return dict(sorted(costs.items()))


def unit_rows(results):
    costs, alone = unit_costs_ms(results, "fsdp"), unit_costs_ms(results, "local")
    for count, cost in costs.items():
        of_model = f", of which {alone[count]:.3f} without a wrapper" if count in alone else ""
        yield f"a unit among {count}, processor time of a rank", f"{cost:.3f} ms{of_model}", verdict(cost, UNIT_TARGET_MS)
    if len(costs) > 1:
        growth, own = [of[max(of)] / of[min(of)] if len(of) > 1 else None for of in (costs, alone)]
        yield (f"the same among {max(costs)} / among {min(costs)}", f"{growth:.2f}{f', without a wrapper {own:.2f}' if own else ''}",
               verdict(growth, UNIT_GROWTH_TARGET))


def glance(results):
    """The summary: the ratios to peers, then the other targets."""
    lines = glance_table(results)
    rows = [*limit_rows(results), *growth_rows(results), *unit_rows(results)]
    if rows:
        lines += ["", "| beside that | measured | |", "| --- | --- | --- |", *(f"| {' | '.join(row)} |" for row in rows)]
    return lines


def ratio_line(results, model, ranks, ours, other, target):
    time_ratios = ratios(results, model, ranks, ours, other, "step_s_median")
    if not time_ratios:
        return []
    cpu_ratios = ratios(results, model, ranks, ours, other, "cpu_s")
    return [f"| {model} | {ranks} | {PROGRAMS[ours][1]} | {PROGRAMS[other][1]} | {spread(time_ratios)} | {spread(cpu_ratios)} | "
            f"{'' if target is None else verdict(statistics.median(time_ratios), target)} |"]


def ratio_table(results):
    lines = ["| model | ranks | ours | fastest peer of the stage | step time, ours / theirs | processor time, ours / theirs | target |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    for model, ranks in cases(results):
        for ours in ("tessera fsdp", "tessera sdp", "tessera oss", "tessera ddp", "tessera local"):
            if fastest := fastest_peer(results, model, ranks, ours):
                lines += ratio_line(results, model, ranks, ours, fastest, TARGETS.get((ours, model)))
        for (ours, other, of_model), target in OWN_TARGETS.items():
            if model == of_model:
                lines += ratio_line(results, model, ranks, ours, other, target)
    return lines


def full_table(results):
    lines = ["| model | ranks | program | step, ms (range over runs) | processor, ms | RSS growth, MiB | with `MALLOC_MMAP_THRESHOLD_` | held, MiB | sent / parameters |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for model, ranks in cases(results):
        for program in PROGRAMS:
            runs = good_runs(results, model, ranks, program)
            if not runs:
                continue
            times = [run["step_s_median"] * 1e3 for run in runs]
            growth = statistics.median(growth_mib(run) for run in runs)
            returning = results.get("returning", {}).get(f"{model}/{ranks}/{program}", {"error": ""})
            least = f"{growth_mib(returning):.0f}" if "error" not in returning else ""
            held, sent = "", ""
            if "param_bytes" in runs[0]:
                held = f"{held_mib(runs[0]):.0f}"
                sent = f"{runs[0]['sent_bytes'] / runs[0]['model_bytes']:.2f}"
            lines.append(f"| {model} | {ranks} | {PROGRAMS[program][1]} | {spread(times, 1)} | "
                         f"{statistics.median(run['cpu_s'] for run in runs) * 1e3:.1f} | {growth:.0f} | {least} | {held} | {sent} |")
    return lines


def problems(results):
    lines = []
    for model, ranks in cases(results):
        for program in [*PROGRAMS, LIMIT]:
            runs = results["runs"].get(f"{model}/{ranks}/{program}", [])
            failed = [run["error"] for run in runs if "error" in run]
            error = f"{failed[-1]} (in {len(failed)} of {len(runs)} runs)" if failed else loss_problem(results, model, ranks, program)
            if error:
                name = program if program == LIMIT else PROGRAMS[program][1]
                lines.append(f"* {name}, {model}, {ranks} ranks: {error}")
    return lines or ["None: every program ran each time, and all losses agreed."]


def draw(results, folder):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tessera"
    matplotlib.rcParams["svg.fonttype"] = "none"  # text, not outlines
    import matplotlib.pyplot as plt

    ranks_shown = min(ranks for _, ranks in cases(results))
    models = [model for model, ranks in cases(results) if ranks == ranks_shown]
    programs = [p for p in PROGRAMS if PROGRAMS[p][0] is not None and any(good_runs(results, m, ranks_shown, p) for m in models)]
    plots = [("step_time", "ms a step", lambda run: run["step_s_median"] * 1e3),
             ("memory", "growth of resident memory, MiB", growth_mib)]
    for name, label, value in plots:
        columns = min(PLOTS_IN_A_ROW, len(models))
        rows = -(-len(models) // columns)
        figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 4.6 * rows), sharey=True, squeeze=False)
        for axis in axes.flat[len(models):]:
            axis.set_visible(False)
        for axis, model in zip(axes.flat, models):
            shown = [p for p in programs if good_runs(results, model, ranks_shown, p)]
            for row, program in enumerate(programs):
                if program not in shown:
                    continue
                values = [value(run) for run in good_runs(results, model, ranks_shown, program)]
                middle = statistics.median(values)
                axis.barh(row, middle, color="#c2571a" if program.startswith("tessera") else "#8a97a6",
                          xerr=[[middle - min(values)], [max(values) - middle]], ecolor="#333333", capsize=2)
                axis.text(max(values), row, f" {middle:.0f}" if middle >= 100 else f" {middle:.3g}", va="center", fontsize=7)
            axis.set_yticks(range(len(programs)), [PROGRAMS[p][1].replace(", bucket views", "") for p in programs], fontsize=8)
            axis.invert_yaxis() if axis is axes[0][0] else None
            axis.margins(x=0.18)
            axis.set_title(f"{model}, {ranks_shown} ranks", fontsize=10)
            axis.set_xlabel(label, fontsize=8)
            axis.tick_params(axis="x", labelsize=7)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
        figure.tight_layout()
        figure.savefig(os.path.join(folder, name + ".svg"), metadata={"Date": None})
        plt.close(figure)


def provenance(results):
    peers = ", ".join(f"{name} {version}" for name, version in results.get("versions", {}).items())
    without_ours = results.get("rounds_without_ours", 0)
    count = results["rounds"] - without_ours
    rounds = "one round" if count == 1 else f"at most {count} rounds"
    text = f"Measured on {results['machine']}{f', against {peers}' if peers else ''}, in {rounds}."
    return text + (" Peers that are not among the two fastest of a stage were measured before that." if without_ours else "")


def write_documentation(results, docs):
    """Writes benchmarks.md between its two marks, and the plots."""
    folder, document = os.path.join(docs, "benchmarks"), os.path.join(docs, "benchmarks.md")
    draw(results, folder)
    text = "\n".join([provenance(results), "", *glance(results), "", "### Against peers", "", *ratio_table(results), "",
                      "![Step time of every program](benchmarks/step_time.svg)", "", "![Memory of every program](benchmarks/memory.svg)", "",
                      "### Every program", "", *full_table(results), "", "### Programs that failed, or train otherwise", "", *problems(results)])
    begin, end = "<!-- begin: written by `make bench` -->", "<!-- end: written by `make bench` -->"
    with open(document) as file:
        before, _, rest = file.read().partition(begin)
    with open(document, "w") as file:
        file.write(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")
