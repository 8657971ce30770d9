"""Writes docs/<script>.md: one page for each algorithm, all on one template.

    python docs/build.py            writes the pages
    python docs/build.py --check    exits with 1 where a page is not what this would write

The diff and the line numbers come from the scripts as they are, and the table of results from docs/tldr.md, which
benchmarks/plot.py wrote.
"""

import difflib
import pathlib
import sys

DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent

EQUATIONS = {
    "magrpo": "A_g = R_g - mean(R_1 .. R_G)",
    "marloo": "A_g = R_g - mean of the G-1 others = G/(G-1) (R_g - mean(R_1 .. R_G))",
    "maremax": "A_g = R_g - max(R_1 .. R_G)",
    "mareinforce": "A_g = R_g",
}

ABOUT = {
    "magrpo": "Multi-agent group relative policy optimization ([arXiv 2508.04652](https://arxiv.org/abs/2508.04652)). "
    "With one agent it is GRPO ([2402.03300](https://arxiv.org/abs/2402.03300)) in the form of Dr. GRPO "
    "([2503.20783](https://arxiv.org/abs/2503.20783)).\n\n"
    "The mean of the group includes R_g itself, so the gradient, before clipping, is (G-1)/G times an unbiased "
    "estimate of the policy gradient. This factor is the same for every completion, and Adam nearly cancels it.",
    "marloo": "Multi-agent REINFORCE leave-one-out. With one agent it is RLOO "
    "([Kool et al., 2019](https://openreview.net/forum?id=r1lgTGL5DE); "
    "[arXiv 2402.14740](https://arxiv.org/abs/2402.14740)).\n\n"
    "The baseline of a completion does not depend on that completion, so the gradient, before clipping, is an "
    "unbiased estimate of the policy gradient. It is G/(G-1) times MAGRPO's. Adam divides by the size of the "
    "gradient, so the two scripts give nearly equal curves; but for clipping and Adam's epsilon they would be equal. "
    "That is arithmetic, not a bug.",
    "maremax": "The baseline is the best return of the group, as in CoMLRL, which named the method. ReMax "
    "([arXiv 2310.10505](https://arxiv.org/abs/2310.10505)) instead subtracts the reward of a greedy answer, which "
    "does not depend on the sampled completion and so keeps the gradient unbiased.\n\n"
    "The maximum of the group does depend on the completion, so the update is biased on purpose: no advantage is "
    "positive, the best completion gets no gradient, and all others are made less likely; nothing decides where their "
    "probability goes. The sum of a group's advantages is negative, which lowers the likelihood of whatever is "
    "sampled and raises entropy.",
    "mareinforce": "REINFORCE (Williams, 1992) with the shared return and no baseline.\n\n"
    "The gradient, before clipping, is an unbiased but noisy estimate of the policy gradient. Where all returns are "
    "positive, as in `tldr`, every sampled completion is made more likely, the better ones more so: what is learned "
    "is the difference of large, nearly equal updates.",
    "ippo": "Independent PPO ([arXiv 2011.09533](https://arxiv.org/abs/2011.09533)): each agent runs PPO "
    "([1707.06347](https://arxiv.org/abs/1707.06347)) on the shared reward, with a value function of its own. Agents "
    "share no parameters. With one agent it is PPO.",
}

TREE_EQUATION = """    {advantage}
    L_i = - sum over nodes and g of  w * gamma^turn * A_g * sum_t log pi_i(y_g,t | x, y_g,<t) / max_new_tokens

At a node of the rollout tree, agent i draws G completions y_1 .. y_G of its own prompt x. R_g is the mean return of
the joint actions that contain y_g; the return of a joint action is its reward plus gamma times the mean return of the
node that it leads to. w is the probability that a trajectory drawn from the tree passes through y_g: 1/B for the task
(one of B), times 1/J for each earlier joint action (one of J), times 1/G for the completion. Turns count from 0."""

IPPO_EQUATION = """    delta_t = r_t + gamma_t V_i(s_t+1) - V_i(s_t)              A_t = delta_t + gamma_t * gae_lambda * A_t+1
    rho_t = pi_i(y_t | s_t) / pi_i,old(y_t | s_t)              R_t = A_t + V_i,old(s_t)
    L_i = - sum gamma^turn min(rho_t A_t, clip(rho_t) A_t)
          + vf_coef * 1/2 max((V_i - R_t)^2, (V_i clipped around V_i,old - R_t)^2) - ent_coef * entropy

The state s_t of agent i is its prompt and its tokens before t in this turn. The reward of a turn arrives with the
turn's last token, and the next state is the first one of the next turn. gamma_t is gamma at a turn's last token and 1
elsewhere, so that gamma discounts turns, as in the other scripts. Turns count from 0. Each sum is over tokens; it is
averaged over trajectories and divided by max_new_tokens."""

# (what it is, a part of the line to link to)
DETAILS = [
    ("Sampling draws from the model's whole distribution: no top-k, no top-p, no repetition penalty. Only the stop "
     "tokens are read from the model's own generation_config. So the policy that acts is the one in the loss.",
     "torch.searchsorted("),
    ("A completion ends with its first stop token (an end-of-sequence token of the model or its tokenizer, or what ends "
     "a turn in the chat template), trained like every other token. Nothing is kept after it: no padding is masked.",
     "stops = torch.isin("),
    ("In sampling, a prompt is computed once for its G completions.", "distinct = {text: b"),
    ("In training, a prompt is also computed once: its completions continue from its cache, with gradients.",
     "x.flatten(1).index_select(0, owner)"),
    ("Completions that have stopped are removed from their row, and empty rows from the batch, where that makes the "
     "batch at least an eighth smaller.", "if 8 * len(remaining) * most <="),
    ("The completions of a prompt decode as one row: attention reads the prompt's keys once for all of them. The "
     "completions' own keys are kept apart.", "def attention("),
    ("The cache has room for all tokens from the start; transformers' own cache copies everything for each new token.",
     "buffers = [keys.new_zeros("),
    ("Logits are float32 (on CUDA with TF32 products) whatever precision the model runs in, and are divided by the "
     "sampling temperature.", "with torch.autocast(model.device.type, enabled=False):"),
    ("Logits of more than 256 MB are computed in pieces, which the backward pass computes again.",
     "use_reentrant=False)"),
    ("A branch that ends early adds no further reward; the other branches are not reweighted.",
     "None if step.done or"),
    ("Evaluation has random numbers of its own: training does not depend on how often the agents are evaluated.",
     "seed_of = lambda"),
    ("Every epoch visits the tasks in its own random order, which follows from the seed and the epoch: a resume needs "
     "no saved state to find it again.", "np.random.default_rng([args.seed, epoch])"),
    ("With several processes the gradient is the mean of theirs, and each process has its own seed.",
     "dist.all_reduce(flat)"),
    ("A metric that is not finite, such as a loss, a gradient norm or the entropy of what was sampled, stops the run "
     "before that iteration is logged or saved; it is not replaced by a constant.",
     "if bad := [name for name, value in metrics"),
    ("A checkpoint is written to a new file, which then replaces the old one by a rename.", "os.replace(state_file"),
]  # fmt: skip

TREE_DETAILS = [
    ("Returns are float64. An advantage of at most 1e-9, times the node's mean return where that is above 1, is not "
     "trained on: it is the rounding error of equal returns, which Adam would blow up.", "dtype=torch.float64)  # (J,)"),
    ("A completion is credited with the mean, not the sum, over the joint actions that contain it, so that the scale "
     "does not grow with `--joint-mode cross`.", "group.returns = member.bincount("),
    ("The loss is a sum over tokens divided by the constant `max_new_tokens`, not by each completion's length, which "
     "would favour long bad answers.", "weight = node.weight / G * args.gamma ** len(node.history)"),
    ("All denominators are fixed before the rollout is cut into batches: the gradient does not depend on "
     "`--max-batch-tokens`.", "for batch in micro_batches(agent, rows, args.max_batch_tokens):"),
    ("Equal completions of a prompt are computed once, with the sum of their weights. Completions without an "
     "advantage (with a baseline, those of a group whose returns are all equal) are not computed at all. Where no "
     "completion has one, the gradient is zero and AdamW still takes a step.", "if not abs(advantage) <= 1e-9"),
    ("There is one optimizer step per rollout, so the policy in the loss is always the one that sampled, and no ratio "
     "is needed.", "agent.optimizer.step()"),
]  # fmt: skip

IPPO_DETAILS = [
    ("The value of a token is read from the hidden state that predicts it, before the token is seen.",
     "agent.value_head(seen.float())"),
    ("The old log-probabilities are those of the sampling loop: in the first step every ratio is 1 up to rounding. "
     "In bfloat16 this rounding is coarse, and `approx_kl` shows it.",
     "ratios = (logratios := logprobs - old_logprobs).exp()"),
    ("The values of each turn start at the mean return from that turn on, when it is first reached. If they started at "
     "zero, the first advantages would be the returns, which make every sampled completion more likely; a model that "
     "already solves most tasks forgets them that way. With one value head for all turns, whose bias was the return "
     "from the first turn on, later turns were valued too high and their answers made less likely: two-turn runs on "
     "functions lost much of what the model could do ([results](results.md#two-turns)).",
     "agent.value_head.bias.data[t] ="),
    ("An advantage of at most 1e-6, times the mean return where that is above 1, counts as 0: it is the rounding error "
     "of equal returns.", "if abs(a) <= rounding"),
    ("The first turn draws G completions, and each later turn one for each branch: G independent trajectories, no "
     "tree.", "[G] + [1] * (T - 1)"),
    ("GAE runs over the tokens of a turn and continues into the next turn of the same trajectory.",
     "def gae("),
    ("Minibatches consist of whole trajectories, and are shuffled anew in each pass.",
     "torch.randperm(len(trajectories))"),
    ("`--target-kl` ends the passes over a rollout early, after the step that measured an approx_kl above it; all "
     "processes use the same approx_kl.",
     "args.target_kl is not None"),
    ("`--norm-adv` is off by default, because it hides the size of the returns. It stands in a block of its own.",
     "# >>> NORMALISATION"),
]  # fmt: skip

METRICS = """| metric | meaning |
|---|---|
| `train/return`, `eval/return` | mean return of the trajectories; evaluation is on held-out tasks |
| `*/reward_turn1` ... | mean reward of each turn, over the branches that reached it; where code passes all tests before the last turn, with the reward of the turns that it saves |
| `*/gain_turn2` ... | reward of a turn less that of the turn before, over the trajectories that went on |
| `eval/pass@1`, `eval/pass@2` ... | chance that at least one of k trajectories passes all tests, of `--eval-generations` k or more |
| `*/<part>` | the environment's numbers where a branch ends; `<part>_turn1` ... at each turn of several |
| `*/zero_variance_groups` | share of the groups of two or more in which all returns are equal |
| `agent_0/loss` | L_i; its size says little, since the baseline changes with the policy |
| `agent_0/grad_norm` | norm of the gradient before clipping |
| `agent_0/entropy` | estimate of the policy's entropy, in nats a token: the mean of -log pi over the sampled tokens; for greedy evaluation it is 0 |
| `agent_0/completion_length` | tokens, with the stop token |
| `agent_0/stopped` | share of the completions that ended by themselves |
| `eval/agent_0/...` | entropy, completion_length and stopped of evaluation |
| `time/sample`, `time/reward`, `time/update` | seconds of the iteration |
| `tokens` | completion tokens sampled in the iteration, by all agents and processes |
| `tokens_per_second` | of these, over the whole iteration without evaluation |"""

IPPO_METRICS = """
| `agent_0/policy_loss`, `agent_0/value_loss` | the parts of the loss; like it, grad_norm, approx_kl and clipfrac, means over the steps of the iteration |
| `agent_0/approx_kl` | mean of rho - 1 - log rho, an estimate of KL(old, new), before each step: the last step is not in it |
| `agent_0/clipfrac` | share of tokens whose ratio is outside of 1 +- clip_coef |
| `agent_0/explained_variance` | share of the variance of R_t within a turn that the values explained before the update; at most 1; left out where all R_t of a turn are equal. With `--gae-lambda` below 1, R_t contains values too, and it says less |
| `agent_0/optimizer_steps` | steps taken; fewer than epochs x minibatches where `--target-kl` ended the passes |"""

DIFFERENCES = """The published library of this family, [CoMLRL](https://pypi.org/project/comlrl/), differs in these points (read in
`trainers/reinforce/magrpo.py` of its version 1.4.3):

- it trains the padding after completions that end before the longest of their group, but not the last position of a
  row: the last token is not fed in, and the logits are then cut by one more;
- `advantage_normalization` is on by default, after the baseline: mean, leave-one-out, maximum and zero baselines then
  give the same advantages;
- it samples at temperature 0.6, top-p 0.6 and top-k 50, but trains the whole distribution at temperature 1;
- it replaces a loss that is not finite by the constant 0.1;
- in cross mode it sums the returns of the joint actions that contain a completion, so that they grow with G^(N-1);
- if a pad token occurs in a prompt, it takes the rest of the prompt for the beginning of the completion, and treats
  the completion's text as empty.

We do not divide by the group's standard deviation (as in Dr. GRPO). We multiply the weight of a turn by `gamma^turn`,
which makes the discounted return the objective; with the default gamma of 1 this factor is 1."""

IPPO_DIFFERENCES = """The published library of this family, [CoMLRL](https://pypi.org/project/comlrl/), differs in these points (read in
`trainers/actor_critic/iac.py` of its version 1.4.3): its policy loss is the log-probability of the whole answer times
the advantage, without ratio or clipping; it has no entropy bonus; and it has one value for each answer, not one for
each token.

Defaults that differ from the other scripts: the value function has a learning rate of its own
(`--critic-learning-rate`). For a value head on the actor, whose weights start at zero, it is ten times the actor's;
with `--lora-rank` it is equal to the actor's, which is ten times as high already. For `models/tiny` the actor's
learning rate is half the other scripts', since this script takes several optimizer steps per rollout
(`--update-epochs` x `--num-minibatches`) and the others take one.

Defaults and details that differ from CleanRL's `ppo.py`:

- `--gae-lambda` is 1; `--vf-coef` is 0.1; `--ent-coef` is 0; `--max-grad-norm` is 1; there are two passes of two
  minibatches each;
- advantages are not normalised, and with `--norm-adv` over an iteration, not over each minibatch;
- the value function is a head on the actor unless `--use-separate-critic` is given, has an output for each turn, and
  starts at the mean return from that turn on;
- minibatches consist of whole trajectories, not of single steps;
- `--gamma` is 1, applies per turn, and weights the policy loss of a turn by `gamma^turn`;
- `--target-kl` is checked after each minibatch, not after each epoch;
- Adam's eps is 1e-8, not 1e-5;
- the sums in the loss are divided by constants, not by the number of tokens."""


def details(script, items):
    lines = (ROOT / f"{script}.py").read_text().splitlines()
    out = []
    for number, (text, needle) in enumerate(items, start=1):
        found = [k for k, line in enumerate(lines, start=1) if needle in line]
        if not found:
            sys.exit(f"docs/build.py: error: {script}.py has no line with {needle!r}; correct DETAILS.")
        out.append(f"{number}. {text} [{script}.py:{found[0]}](../{script}.py#L{found[0]})")
    return "\n".join(out)


def rendered_diff(script):
    if script == "magrpo":
        return "The other pages show their diff to this one. What makes it MAGRPO is one line:\n\n" + block(script)
    ours, theirs = ((ROOT / f"{name}.py").read_text().splitlines() for name in ("magrpo", script))
    diff = list(difflib.unified_diff(ours, theirs, "magrpo.py", f"{script}.py", lineterm="", n=0))
    changed = sum(line[:1] in "+-" for line in diff[2:])
    return f"{changed} changed lines, of {len(theirs)}:\n\n```diff\n" + "\n".join(diff) + "\n```"


def block(script):
    text = (ROOT / f"{script}.py").read_text()
    line = text.split("# >>> ALGORITHM\n")[1].split("# <<< ALGORITHM")[0].strip()
    return f"```python\n{line}\n```"


def page(script):
    ippo = script == "ippo"
    equation = IPPO_EQUATION if ippo else TREE_EQUATION.format(advantage=EQUATIONS[script])
    results = (DOCS / "tldr.md").read_text().strip()
    command = f"python benchmarks/compare.py --scripts {script} --name {script}"
    return f"""# {script}.py

{ABOUT[script]}

## Equation

{equation}

## Diff

{rendered_diff(script)}

## Logged metrics

{METRICS}{IPPO_METRICS if ippo else ""}

## Implementation details

{details(script, (IPPO_DETAILS if ippo else TREE_DETAILS) + DETAILS)}

## Where it differs from the published code

{IPPO_DIFFERENCES if ippo else DIFFERENCES}

## Results

The evaluation return of all scripts on held-out sample posts (`--env tldr --num-agents 2`).
`{command}` runs this script alone;
`python benchmarks/compare.py && python benchmarks/plot.py` runs all scripts and draws the curves.

{results}

![learning curves](tldr.png)
"""


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit("docs/build.py: error: its only argument is --check, which writes nothing.")
    stale = []
    for script in ABOUT:
        path, text = DOCS / f"{script}.md", page(script)
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(path.name)
    if stale:
        sys.exit(f"docs/build.py: error: {', '.join(stale)} not up to date; run python docs/build.py.")
