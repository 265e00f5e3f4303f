#!/usr/bin/env bash
# Runs two steps of GRPO with verl. Its trainer and its vLLM engine share a GPU:
#
#     harness exec --memory 24GiB --values cpu -- ci/engine_verl.sh FOLDER
#
# FOLDER gets a model and prompts. Needs a Python 3.11 with `verl[vllm]==0.9.1` and `ray==2.49.2`. Takes 21 minutes on two busy cores.
set -euo pipefail

ci=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$1"
cd "$1"
python "$ci/engine_cases.py" models
python - <<'END'
import pandas, torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("tiny-llama", pad_token="</s>")
tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
tokenizer.save_pretrained("tiny-llama")
AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("tiny-llama")).to(torch.bfloat16).save_pretrained("tiny-llama")
prompt = lambda number: [dict(role="user", content=f"Count to {number}")]
answer = lambda number: dict(style="rule", ground_truth=str(number))
pandas.DataFrame(dict(data_source="numbers", prompt=prompt(number), reward_model=answer(number), extra_info=dict(index=number)) for number in range(16)).to_parquet("prompts.parquet")
END
cat >reward.py <<'END'
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 3)
END
# Ray waits for its processes, which start slowly on few cores.
export RAY_enable_worker_prestart=0 RAY_raylet_start_wait_time_s=240 RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
rollout=actor_rollout_ref.rollout
python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=prompts.parquet data.val_files=prompts.parquet data.train_batch_size=4 \
    data.max_prompt_length=64 data.max_response_length=16 data.dataloader_num_workers=0 actor_rollout_ref.model.path="$PWD/tiny-llama" \
    actor_rollout_ref.model.use_remove_padding=False +actor_rollout_ref.model.override_config.attn_implementation=eager \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2 $rollout.name=vllm $rollout.tensor_model_parallel_size=1 $rollout.n=2 \
    $rollout.gpu_memory_utilization=0.3 $rollout.enforce_eager=True $rollout.log_prob_micro_batch_size_per_gpu=2 $rollout.agent.num_workers=1 \
    reward.custom_reward_function.path="$PWD/reward.py" reward.num_workers=1 ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.include_dashboard=False \
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1 trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_training_steps=2 \
    trainer.logger='[console]' trainer.val_before_train=False trainer.save_freq=-1 trainer.test_freq=-1 trainer.resume_mode=disable
