"""Trains with a trainer of comlrl or trl on the job of a workload, and notes when each update ends.

    pip install comlrl==1.4.3 trl==1.16.0
    python benchmarks/throughput.py --baseline comlrl    (or trl, or gpu.py: they run `python benchmarks/peers.py trl`)

Both read the prompts with the chat template, which they use unchanged, and update as often as the job says.
"""

import json
import os
import sys

import transformers
from datasets import Dataset
from timed import clock, read_job, score, write_result
from transformers import AutoTokenizer


class Updates:
    """When each update ended, and how many completion tokens it had."""

    def __init__(self):
        self.ends = []
        self.tokens = []
        self.drawn = 0  # tokens of the update that runs

    def end(self, *_):
        self.ends.append(clock())
        self.tokens.append(self.drawn)
        self.drawn = 0


def read_dataset(job):
    """The prompts of all updates, each used once."""
    with open(job["prompts"]) as file:
        return Dataset.from_list([{"prompt": task["text"]} for task in json.load(file)[:-1]])


def train_comlrl(job, updates):
    from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer

    class Counted(MAGRPOTrainer):
        def _generate_completions(self, *args, **kwargs):
            data = super()._generate_completions(*args, **kwargs)
            updates.drawn += sum(data["response_lens"])
            return data

    def reward(*completions):
        """One list of texts per agent, aligned; a number for each joint action."""
        return [score(texts) for texts in zip(*completions)]

    config = MAGRPOConfig(
        num_train_epochs=1,
        num_turns=1,
        num_agents=2,
        agent_learning_rate=job["learning_rate"],
        joint_mode="aligned",
        num_generations=job["num_generations"],
        max_new_tokens=job["completion_tokens"],
        # the whole distribution: None for top_k would leave it to the model
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        early_termination_threshold=None,
        eval_interval=0,
        # as ours
        advantage_normalization=False,
        reference_kl_enabled=False,
        agent_devices=job["device"],
        # a buffer of B prompts (with their G completions) for each agent, trained in one piece: one optimizer step
        rollout_buffer_size=job["num_tasks"],
        train_batch_size=job["num_tasks"],
    )
    # it has no mixed precision: on a GPU the weights themselves are bfloat16, its fastest option
    dtype = "bfloat16" if job["device"] == "cuda" else "float32"
    trainer = Counted(
        num_agents=2,
        args=config,
        agent_model=job["model"],
        model_config={"torch_dtype": dtype, "attn_implementation": "sdpa"},
        tokenizer=AutoTokenizer.from_pretrained(job["model"]),
        reward_func=reward,
        train_dataset=read_dataset(job),
    )
    trainer.verbose = False
    # the last agent's step ends an update
    trainer.optimizers[-1].register_step_post_hook(updates.end)
    trainer.train()


def train_trl(job, updates):
    from trl import GRPOConfig, GRPOTrainer

    class Ticker(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            updates.end()

    def reward(prompts, completions, completion_ids, **_):
        updates.drawn += sum(map(len, completion_ids))
        return [score([text]) for text in completions]

    cuda = job["device"] == "cuda"
    config = GRPOConfig(
        max_steps=job["updates"] + 1,
        # one optimizer step per rollout, which is sampled and trained in one batch
        num_iterations=1,
        per_device_train_batch_size=job["num_tasks"] * job["num_generations"],
        num_generations=job["num_generations"],
        max_completion_length=job["completion_tokens"],
        learning_rate=job["learning_rate"],
        max_grad_norm=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        shuffle_dataset=False,
        seed=job["seed"],
        # no reference model
        beta=0.0,
        # on by default, and slower
        gradient_checkpointing=False,
        # autocast over float32 weights, and TF32, as ours; bf16 is on by default, even on a CPU
        bf16=cuda,
        tf32=True if cuda else None,
        use_cpu=not cuda,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        # the same loss as our scripts; its other losses cost the same
        loss_type="dr_grpo",
        scale_rewards="none",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        output_dir=os.path.dirname(os.environ["BENCH_JOB"]),
    )
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=read_dataset(job),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[Ticker()],
    )
    trainer.train()


if __name__ == "__main__":
    job = read_job()
    transformers.set_seed(job["seed"])
    updates = Updates()
    {"comlrl": train_comlrl, "trl": train_trl}[sys.argv[1]](job, updates)
    if len(updates.ends) != job["updates"] + 1:
        sys.exit(f"{len(updates.ends)} updates were made, not {job['updates'] + 1}")
    # the first one warms up
    seconds = [end - start for start, end in zip(updates.ends, updates.ends[1:])]
    write_result(iteration_s=seconds, tokens=updates.tokens[1:])
