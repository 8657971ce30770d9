"""What benchmarks/peers.py runs in child processes: it makes a model, our environment, and the peers' trainers.

    python benchmarks/peers_child.py job.json

job.json holds the task ("prepare", or a key of TRAINERS), the workload's sizes, folders and flags; see peers.py. What
a process measures goes to the job's "result" file. Heavy imports are inside the functions: our scripts import this
module for its environment, and the peers have an interpreter of their own.
"""

import importlib
import itertools
import json
import math
import os
import resource
import sys
import time
import zlib

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAD, START, STOP = range(3)  # ids of <|endoftext|>, <|im_start|> and <|im_end|>


def reward(texts):
    """A number in [0, 1) that differs between texts and costs nothing; the same for every contestant."""
    return zlib.crc32("\n".join(texts).encode()) / 2**32


def peak_mib():
    """Peak memory of the tensors on a CUDA device, or else of this process in main memory."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10  # of ru_maxrss: bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def read(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def write(path, result):
    with open(path, "w") as file:
        json.dump(result, file)


# Ours: environments as a user would write them, for --env peers_child:Prompts


class Prompts:
    """The prompts of the file BENCH_PROMPTS, the same for all agents, and the reward above.

    The last prompt is for evaluation. The environment notes the time when the script asks for the first prompt of an
    iteration (0), when it calls step() (1), and when that returns (2): [processor seconds, wall seconds].
    """

    def __init__(self, num_agents, num_turns, dataset, seed):
        self.num_agents = num_agents
        self.marks = []  # 3 of each iteration; the first iteration is the evaluation before training
        self.load(num_turns, dataset, seed)

    def load(self, num_turns, dataset, seed):
        self.prompts = read(os.environ["BENCH_PROMPTS"])

    def tasks(self, split):
        return self.prompts[:-1] if split == "train" else self.prompts[-1:]

    def prompts_of(self, task, history):
        return [task["user"]] * self.num_agents

    def score(self, branches):
        Step = importlib.import_module("envs").Step
        return [Step(actions, reward(actions), {}, done=True) for _, _, actions in branches]

    def observe(self, task, history):
        if len(self.marks) % 3 == 0:  # otherwise another prompt of the same iteration
            self.mark()
        return self.prompts_of(task, history)

    def step(self, branches):
        self.mark()
        steps = self.score(branches)
        self.mark()
        return steps

    def mark(self):
        """Notes the time. Ends the run in the iteration BENCH_LAST: all that is measured has been logged by then, and
        what would follow is a checkpoint, 55 GB for two large agents."""
        if "cuda" in os.environ["BENCH_DEVICE"]:
            importlib.import_module("torch").cuda.synchronize()  # queued work is not done yet
        self.marks.append([time.process_time(), time.perf_counter()])
        if len(self.marks) == 3 * int(os.environ["BENCH_LAST"]) + 2:
            # only the process itself can tell its peak on a GPU
            write(os.environ["BENCH_RESULT"], {"peak_mib": peak_mib(), "marks": self.marks})
            os._exit(0)


class Posts(Prompts):
    """The script's own environment tldr, with the same marks."""

    def load(self, num_turns, dataset, seed):
        env = importlib.import_module("envs").make("tldr", self.num_agents, num_turns, dataset, seed)
        self.tasks = env.tasks
        self.prompts_of = env.observe
        self.score = env.step


# Model and prompts: made by our interpreter, read by all contestants


def make_tokenizer(size):
    """A byte-level BPE, as Qwen's, whose merges form a tree of words: a space and letters, one token per word.

    So prompts of any number of tokens are easy to write, for any vocabulary size. Returns (tokenizer, words).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    space = "Ġ"  # as the byte level writes it
    merges = []
    words = []
    for stem in itertools.chain([space], words):  # words grows while it is read: shorter ones come first
        room = size - len(tokens) - len(words)
        for letter in "abcdefghijklmnopqrstuvwxyz"[:room]:
            words.append(stem + letter)
            merges.append((stem, letter))
        if room <= 26:
            break
    vocabulary = {token: k for k, token in enumerate(tokens + words)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(tokens[:3])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=tokens[STOP], pad_token=tokens[PAD])
    tokenizer.chat_template = CHAT
    return tokenizer, [word.replace(space, " ") for word in words]


def make_model(config, stop):
    """A random model that stops with probability `stop` at every token, whatever it has read.

    Coordinate 0 of every embedding is 8, far above the others, which are about 0.02. So it dominates every hidden
    state, and because the head is the embedding (tied, as in the models that this stands for), all logits share the
    same large term. In the stop token's row, coordinate 0 is chosen so that this token gets probability `stop`; the
    pad token, which some trainers take for the end of a completion, gets practically none.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    # top_k, top_p and temperature are written out: some versions of generate() fill them in otherwise
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    model.generation_config.update(eos_token_id=STOP, pad_token_id=PAD, **sampling)
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[:, 0] = 8.0
        weight[PAD, 0] = 0.0
        shared = model.base_model(torch.arange(3, 23)[None]).last_hidden_state[0, -1, 0]
        # the stop logit less that of the other tokens, which are all but stop and pad
        above = math.log(stop / (1 - stop) * (len(weight) - 2)) if stop else -100.0
        weight[STOP, 0] = 8.0 + above / shared
    return model


def prepare(job):
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(job["seed"])
    tokenizer, words = make_tokenizer(job["config"]["vocab_size"])
    make_model(job["config"], job["stop"]).save_pretrained(job["model"])
    tokenizer.save_pretrained(job["model"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])  # as all contestants load it

    def with_template(user):
        messages = [{"role": "user", "content": user}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text, len(tokenizer(text).input_ids)

    size = job["prompt_tokens"] - with_template("")[1]
    with open(job["prompts"], "w") as file:
        for choice in torch.randint(len(words), (job["num_prompts"], size)).tolist():
            user = "".join(words[k] for k in choice)
            text, length = with_template(user)
            if length != job["prompt_tokens"]:
                raise ValueError(f"a prompt has {length} tokens, not {job['prompt_tokens']}")
            # our scripts get the user message; the peers get the text with the template, which they use unchanged
            file.write(json.dumps({"user": user, "text": text}) + "\n")


# Theirs: one function per trainer, which calls clock.tick() at the end of every update


class Clock:
    """When each update ended, and how many completion tokens it had."""

    def __init__(self, job):
        self.job = job
        self.ends = []
        self.tokens = []
        self.drawn = 0  # tokens of the update that runs

    def tick(self, *_):
        import torch

        if self.job["device"] == "cuda":
            torch.cuda.synchronize()  # queued work is not done yet
        self.ends.append(time.perf_counter())
        self.tokens.append(self.drawn)
        self.drawn = 0


def dataset(job):
    from datasets import Dataset

    return Dataset.from_list([{"prompt": line["text"]} for line in read(job["prompts"])[:-1]])


def joint_reward(*completions):
    """comlrl passes one list of texts per agent, aligned, and expects one number per joint action."""
    return [reward(texts) for texts in zip(*completions)]


def comlrl_magrpo(job, clock):
    from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
    from transformers import AutoTokenizer

    class Counted(MAGRPOTrainer):
        def _generate_completions(self, *args, **kwargs):
            data = super()._generate_completions(*args, **kwargs)
            clock.drawn += sum(data["response_lens"])
            return data

    # the file holds the prompts of all updates, each used once. top_k 0 turns it off; None would leave it to the model
    config = {"num_train_epochs": 1, "num_turns": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    config |= {"num_agents": job["num_agents"], "agent_learning_rate": job["learning_rate"], "joint_mode": "aligned"}
    config |= {"num_generations": job["num_generations"], "max_new_tokens": job["completion_tokens"]}
    config |= {"early_termination_threshold": None, "eval_interval": 0}
    config |= {"advantage_normalization": False, "reference_kl_enabled": False}  # as ours
    config |= {"agent_devices": job["device"]}  # all agents on one device, as ours; "mp" is for one device each
    # a buffer of B prompts (with their G completions) for each agent, trained in one piece: one optimizer step
    config |= {"rollout_buffer_size": job["num_tasks"], "train_batch_size": job["num_tasks"]}
    trainer = Counted(
        num_agents=job["num_agents"],
        args=MAGRPOConfig(**config),
        agent_model=job["model"],
        # comlrl has no mixed precision: on CUDA the weights themselves are bfloat16, its fastest option
        model_config={"torch_dtype": "bfloat16" if job["bf16"] else "float32", "attn_implementation": "sdpa"},
        tokenizer=AutoTokenizer.from_pretrained(job["model"]),
        reward_func=joint_reward,
        train_dataset=dataset(job),
    )  # no wandb_config: nothing is logged
    trainer.verbose = False  # no progress bar
    trainer.optimizers[-1].register_step_post_hook(clock.tick)  # the last agent's step ends an update
    trainer.train()


def trl_grpo(job, clock):
    import transformers
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    class Ticker(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            clock.tick()

    def text_reward(prompts, completions, completion_ids, **_):
        clock.drawn += sum(map(len, completion_ids))
        return [reward([text]) for text in completions]

    rows = job["num_tasks"] * job["num_generations"]
    batch = job["trl_rows"] or rows  # the whole rollout at once, unless it does not fit
    # one optimizer step per rollout, which is sampled in one batch
    config = {"max_steps": job["updates"] + 1, "num_iterations": 1}
    config |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": rows // batch}
    config |= {"num_generations": job["num_generations"], "max_completion_length": job["completion_tokens"]}
    config |= {"learning_rate": job["learning_rate"], "max_grad_norm": job["max_grad_norm"]}
    config |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "shuffle_dataset": False, "seed": job["seed"]}
    config |= {"beta": 0.0}  # no reference model
    config |= {"gradient_checkpointing": False}  # on by default, and slower
    # autocast over float32 weights, and TF32, as ours; bf16 is on by default, even on a CPU
    cuda = job["device"] == "cuda"
    config |= {"bf16": job["bf16"], "tf32": True if cuda else None, "use_cpu": not cuda}
    config |= {"model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"}}
    config |= {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    config |= {"output_dir": os.path.dirname(job["result"])}
    # the same loss as our scripts; trl's other losses cost the same
    config |= {"loss_type": "dr_grpo", "scale_rewards": "none"}
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=text_reward,
        args=GRPOConfig(**config),
        train_dataset=dataset(job),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[Ticker()],
    )
    trainer.train()


TRAINERS = {"comlrl MAGRPOTrainer": comlrl_magrpo, "trl GRPOTrainer": trl_grpo}

if __name__ == "__main__":
    (job,) = read(sys.argv[1])
    if job["task"] == "prepare":
        prepare(job)
    else:
        import transformers

        transformers.set_seed(job["seed"])
        clock = Clock(job)
        TRAINERS[job["task"]](job, clock)
        if len(clock.ends) != job["updates"] + 1:
            sys.exit(f"{len(clock.ends)} updates were made, not {job['updates'] + 1}")
        seconds = [end - start for start, end in zip(clock.ends, clock.ends[1:])]  # the first update warms up
        result = {"seconds": seconds, "tokens": clock.tokens[1:], "peak_mib": peak_mib()}
        write(job["result"], result)
