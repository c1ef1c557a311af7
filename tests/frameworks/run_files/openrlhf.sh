# An example in the style of OpenRLHF's scripts.
python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path some/model \
   --algo.kl.use_loss \
   --algo.kl.estimator k3 \
   --algo.kl.init_coef 1e-3 \
   --algo.advantage.estimator group_norm
