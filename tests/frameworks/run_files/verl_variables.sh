#!/usr/bin/env bash
#SBATCH --job-name=kl   # --beta 9
set -xeuo pipefail

project=$(basename "$PWD")   # what only a shell knows is no setting of the KL
adv_estimator=grpo
use_kl_in_reward=false
kl_coef=0.0
use_kl_loss=True
kl_loss_coef=${KL_COEF:-"0.002"}
loss_agg_mode='seq-mean-token-sum'
rollouts=$((16 * 8))
if [ "${ENGINE:-vllm}" = "vllm" ]; then
    engine_args="actor_rollout_ref.rollout.mode=async"
else
    engine_args=""
fi

KL=(
    actor_rollout_ref.actor.use_kl_loss=${use_kl_loss}
    # actor_rollout_ref.actor.kl_loss_type=mse
    actor_rollout_ref.actor.kl_loss_type=low_var_kl+
    actor_rollout_ref.actor.kl_loss_coef="${kl_loss_coef}"
)

python3 prepare.py --loss_agg_mode token-mean
ray job submit --no-wait --runtime-env=env.yaml \
    -- python3 -m verl.trainer.main_ppo --config-name=ppo_trainer \
    algorithm.adv_estimator=${adv_estimator} \
    algorithm.use_kl_in_reward=${use_kl_in_reward} algorithm.kl_ctrl.kl_coef=$kl_coef \
    +actor_rollout_ref.rollout.seed=1 "${KL[@]}" \
    actor_rollout_ref.actor.loss_agg_mode=${loss_agg_mode} \
    data.train_batch_size="$rollouts" actor_rollout_ref.actor.ppo_mini_batch_size=${rollouts} \
    trainer.experiment_name="${project}-${loss_agg_mode}" \
    "$@" 2>&1 | tee "$project.log"
