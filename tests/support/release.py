"""The commands of SAGE-GRPO's release, as published: what follows the name of the program."""

TRAINING = """--pretrained_model_root ./ckpts --learning_rate 1e-5 --batch_size 2 --num_generations 4 --max_steps 10000
--output_dir ./outputs --enable_fsdp --enable_gradient_checkpointing --sp_size 2 --sde_type "sage_grpo"
--use_grad_balancing True --enable_timestep_permutation True --kl_weight 1e-5 --kl_coef 1e-7 --use_moving_KL True
--update_ref_model_step 10 --use_dual_kl True --dual_kl_moving_weight 1.0 --dual_kl_step_weight 0.1
--reference_mode_offload True"""
"""The 8-GPU command of its README."""

SAMPLING = """--prompt 'A girl holding a paper with words "Hello, world!"' --valid_video_csv assets/demo_sample.csv
--resolution 480p --fixed_size 480x864 --aspect_ratio 16:9 --seed 930 --num_inference_steps 40 --offloading false
--rewrite false --cfg_distilled false --enable_step_distill false --sparse_attn false --use_sageattn false
--enable_cache false --cache_type deepcache --overlap_group_offloading false --sr false --save_pre_sr_video
--output_path ./outputs/output_samples_864x480_step40_shift5_gs1_seed930 --model_path MODEL"""
"""Its run_inference.sh; MODEL stands for the folder of weights."""
