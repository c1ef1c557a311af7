# In the style of releases before 0.10.2: flags without dots, in a string that a shell runs.
cat > notes.txt <<'END'
python3 -m openrlhf.cli.train_ppo_ray --init_kl_coef 1
END
COEF=1e-5
FLAGS="openrlhf.cli.train_ppo_ray \
   --init_kl_coef $COEF \
   --use_kl_loss --kl_estimator k3 \
   --advantage_estimator group_norm \
   --rollout_batch_size 64 --n_samples_per_prompt=8 --train_batch_size 512"
nohup bash -c "cd somewhere && python3 -m $FLAGS" > log 2>&1 &
