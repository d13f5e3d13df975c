#!/usr/bin/env python3
"""Writes tests/testdata/models/: small random checkpoints with the logits transformers gives them,
with their names as arguments, those alone; or, with the default GGUF file as the argument, what it
gives that one.

Run from the repository's root, with torch, transformers, gguf, tokenizers and safetensors installed, and LLAMA_CPP
naming a checkout of llama.cpp.

Logits are computed in float64. How far transformers' own float32 logits are from those is the
measure of fp32 rounding for that checkpoint; it is kept beside them, and the tests' tolerance is a
multiple of it.
"""
import json
import math
import os
import shutil
import struct
import sys

import numpy as np
import safetensors.torch
import torch
import transformers

OUT = "tests/testdata/models"
VOCAB = 131
GGUF = ["qwen2-window", "qwen3-tied", "gptneox", "falcon-grouped", "phi3-long", "gemma3", "bloom", "mixtral",
        "qwen3moe", "gptoss"]  # .gguf files too
CONVERTED = ["smollm3-tied", "granite", "granite4", "olmo2", "olmo3", "seed-oss", "glm4", "exaone4", "ernie45",
             "hunyuan", "ministral3", "phi4-mini", "gemma4", "gemma4-large", "apertus",
             "qwen35", "qwen2moe", "qwen35moe", "qwen3next", "glm4moe", "minimax-m2", "lfm2", "lfm2moe",
             "granitehybrid", "granitehybridmoe", "deepseek2", "deepseek2-grouped",
             "deepseek3", "glm47flash", "gemma4moe", "nemotron-h", "nemotron-h-moe", "llama4"]  # these by llama.cpp's converter
PROMPT, GREEDY = 9, 20  # tokens that greedy generation begins with, and gives
LLAMA = dict(vocab_size=VOCAB, hidden_size=30, intermediate_size=53, num_hidden_layers=2,
             num_attention_heads=3, num_key_value_heads=3, max_position_embeddings=96,
             tie_word_embeddings=False, bos_token_id=0, eos_token_id=1)
GPT2 = dict(vocab_size=VOCAB, n_embd=35, n_layer=2, n_head=5, n_positions=48, n_inner=53,
            bos_token_id=0, eos_token_id=1)
NEOX = dict(vocab_size=VOCAB, hidden_size=36, intermediate_size=53, num_hidden_layers=2, num_attention_heads=3,
            max_position_embeddings=96, bos_token_id=0, eos_token_id=1)
OPT = dict(vocab_size=VOCAB, hidden_size=35, word_embed_proj_dim=35, ffn_dim=53, num_hidden_layers=2,
           num_attention_heads=5, max_position_embeddings=48, bos_token_id=0, eos_token_id=1, pad_token_id=2)
FALCON = dict(vocab_size=VOCAB, hidden_size=30, num_hidden_layers=2, num_attention_heads=3,
              max_position_embeddings=96, bos_token_id=0, eos_token_id=1)
BLOOM = dict(vocab_size=VOCAB, hidden_size=30, n_layer=2, n_head=3, seq_length=96, bos_token_id=0, eos_token_id=1)
LONGROPE = dict(rope_type="longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.0, 1.5, 2.5, 6.0])
PHI3 = LLAMA | dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, pad_token_id=2)
EXPERTS = dict(num_experts_per_tok=2)
MIXTURE = dict(num_experts=7, num_experts_per_tok=3, moe_intermediate_size=19, shared_expert_intermediate_size=23)
STATES = dict(num_key_value_heads=1, head_dim=16, num_hidden_layers=4, linear_num_key_heads=3,
              linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=12, linear_conv_kernel_dim=4,
              layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"])
HYBRID = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4, mamba_n_heads=8,
              mamba_d_head=8, mamba_d_state=11, mamba_n_groups=1, shared_intermediate_size=53,
              layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"])
# Six value heads of three key heads; the bound of steps, which the authors do not have, is out of the way.
NEMOTRON = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=10, mamba_num_heads=6,
                mamba_head_dim=32, ssm_state_size=11, n_groups=3, time_step_min=1e-12)
LLAMA4 = dict(num_key_value_heads=1, head_dim=10, intermediate_size=19, intermediate_size_mlp=53, num_local_experts=5,
              num_experts_per_tok=1, num_hidden_layers=4, attention_chunk_size=96, pad_token_id=2)
GLM4MOE = dict(num_key_value_heads=1, head_dim=12, num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=7,
               num_experts_per_tok=3, moe_intermediate_size=19, attention_bias=True, num_mtp_layers=0)
DEEPSEEK = dict(kv_lora_rank=20, q_lora_rank=None, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=14,
                num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=7, num_experts_per_tok=3,
                moe_intermediate_size=19, n_shared_experts=2)
GPTOSS = LLAMA | EXPERTS | dict(sliding_window=11, num_local_experts=5, layer_types=None)
YARN = dict(rope_type="yarn", rope_theta=150000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=64)
MULTIPLIERS = dict(embedding_multiplier=5.0, residual_multiplier=0.4, attention_multiplier=0.15, logits_scaling=3.0,
                   rms_norm_eps=0.05)  # large enough to show
GEMMA4 = LLAMA | dict(tie_word_embeddings=True, sliding_window=11, pad_token_id=2, vocab_size_per_layer_input=VOCAB,
                      final_logit_softcapping=12.0)  # small enough to show
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)

# name: (class, configuration, type of the file, tokens, options of save_pretrained)
CASES = {
    "llama-ungrouped": ("Llama", LLAMA | dict(tie_word_embeddings=True), "bfloat16", 40, {}),
    "llama-grouped": ("Llama", LLAMA | dict(num_attention_heads=6, num_key_value_heads=2, head_dim=10,
                                            rope_theta=500.0), "float32", 40, {}),
    "llama-one-kv-head": ("Llama", LLAMA | dict(num_attention_heads=5, num_key_value_heads=1, head_dim=8,
                                                attention_bias=True), "float16", 40,
                          dict(max_shard_size="15KB")),
    "llama-scaled": ("Llama", LLAMA | dict(rope_scaling=LLAMA3), "float16", 90, {}),
    "llama-linear": ("Llama", LLAMA | dict(rope_scaling=dict(rope_type="linear", factor=4.0)), "bfloat16", 40, {}),
    "mistral": ("Mistral", LLAMA | dict(num_key_value_heads=1, sliding_window=40), "bfloat16", 40, {}),
    "gpt2": ("GPT2", GPT2, "float32", 40, {}),
    "gpt2-untied": ("GPT2", GPT2 | dict(n_inner=None, n_head=7, tie_word_embeddings=False), "float16", 48, {}),
    "qwen2": ("Qwen2", LLAMA | dict(hidden_size=36, num_attention_heads=6, num_key_value_heads=1, rope_theta=1e6,
                                    sliding_window=20), "float32", 40, {}),
    "qwen2-window": ("Qwen2", LLAMA | dict(tie_word_embeddings=True, use_sliding_window=True, sliding_window=40,
                                           max_window_layers=1), "float16", 40, {}),
    "qwen3": ("Qwen3", LLAMA | dict(num_attention_heads=6, num_key_value_heads=2, head_dim=14, rope_theta=1e6),
              "float32", 40, {}),
    "qwen3-tied": ("Qwen3", LLAMA | dict(num_key_value_heads=1, head_dim=16, tie_word_embeddings=True), "float16",
                   40, {}),
    "gptneox": ("GPTNeoX", NEOX | dict(rotary_pct=0.34, rotary_emb_base=500), "float16", 40, {}),
    "gptneox-sequential": ("GPTNeoX", NEOX | dict(hidden_size=35, num_attention_heads=5, rotary_pct=0.6,
                                                  use_parallel_residual=False), "float32", 40, {}),
    "opt": ("OPT", OPT, "float32", 48, {}),
    "opt-untied": ("OPT", OPT | dict(num_attention_heads=7, tie_word_embeddings=False), "float16", 40, {}),
    "falcon": ("Falcon", FALCON, "float32", 40, {}),
    "falcon-grouped": ("Falcon", FALCON | dict(hidden_size=48, num_attention_heads=6, num_kv_heads=2,
                                               ffn_hidden_size=53, new_decoder_architecture=True), "float16", 40, {}),
    "falcon-one-norm": ("Falcon", FALCON | dict(hidden_size=36, num_attention_heads=6, num_kv_heads=3,
                                                num_ln_in_parallel_attn=1, new_decoder_architecture=True,
                                                tie_word_embeddings=False), "bfloat16", 40, {}),
    # Longer than what it was trained for from the first token that is looked at on; never.
    "phi3-long": ("Phi3", PHI3 | dict(rope_scaling=LONGROPE, original_max_position_embeddings=8), "float16", 40, {}),
    "phi3-short": ("Phi3", PHI3 | dict(rope_scaling=LONGROPE, original_max_position_embeddings=64,
                                       tie_word_embeddings=True), "float32", 40, {}),
    "phi3": ("Phi3", PHI3 | dict(num_attention_heads=2, num_key_value_heads=1, sliding_window=50,
                                 rope_scaling=dict(rope_type="default", partial_rotary_factor=0.75)),
             "bfloat16", 40, {}),
    "gemma3": ("Gemma3", LLAMA | dict(tie_word_embeddings=True, num_key_value_heads=1, head_dim=14, sliding_window=11,
                                      query_pre_attn_scalar=14, num_hidden_layers=3,
                                      layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
               "float16", 40, {}),
    "gemma3-scaled": ("Gemma3", LLAMA | dict(head_dim=10, query_pre_attn_scalar=7, sliding_window=35,
                                             layer_types=["sliding_attention", "full_attention"], rope_parameters=dict(
                                                 full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e4),
                                                 sliding_attention=dict(rope_type="default", rope_theta=500.0))),
                      "bfloat16", 90, {}),
    "bloom": ("Bloom", BLOOM, "float16", 40, {}),
    "bloom-other-heads": ("Bloom", BLOOM | dict(hidden_size=42, n_head=6), "bfloat16", 90, {}),
    # Longer than their windows, of all layers and of the last ones.
    "mistral-window": ("Mistral", LLAMA | dict(num_key_value_heads=1, sliding_window=11), "bfloat16", 90, {}),
    "qwen2-last-window": ("Qwen2", LLAMA | dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=13,
                                                max_window_layers=2), "float16", 60, {}),
    "mixtral": ("Mixtral", LLAMA | EXPERTS | dict(num_attention_heads=5, num_key_value_heads=1, head_dim=8,
                                                  num_local_experts=5), "float16", 40, {}),
    "qwen3moe": ("Qwen3Moe", LLAMA | EXPERTS | dict(num_key_value_heads=1, head_dim=14, num_experts=7,
                                                    num_experts_per_tok=3, moe_intermediate_size=19,
                                                    norm_topk_prob=True), "float16", 40, {}),
    "qwen3moe-plain": ("Qwen3Moe", LLAMA | EXPERTS | dict(num_attention_heads=6, num_key_value_heads=2, head_dim=10,
                                                          num_experts=11, moe_intermediate_size=21,
                                                          tie_word_embeddings=True), "float32", 40, {}),
    # Longer than the window of each other layer.
    "gptoss": ("GptOss", GPTOSS | dict(num_attention_heads=6, num_key_value_heads=2, head_dim=14,
                                       rope_parameters=YARN), "float16", 90, {}),
    "gptoss-odd": ("GptOss", GPTOSS | dict(num_attention_heads=5, num_key_value_heads=1, head_dim=10,
                                           num_hidden_layers=3, sliding_window=35, num_local_experts=7,
                                           num_experts_per_tok=3, tie_word_embeddings=True,
                                           rope_parameters=YARN | dict(rope_theta=500.0, beta_fast=1.5, beta_slow=0.5,
                                                                       truncate=True, attention_factor=0.8)),
                   "bfloat16", 60, {}),
    "gptoss-plain": ("GptOss", GPTOSS | dict(num_key_value_heads=3, head_dim=16, sliding_window=7,
                                             rope_parameters=dict(rope_type="default", rope_theta=500.0)),
                     "float32", 40, {}),
    "llama-yarn": ("Llama", LLAMA | dict(num_attention_heads=5, num_key_value_heads=1, head_dim=12, rope_scaling=dict(
        rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=24)), "float16", 90, {}),
    # Layers 2 of 3 and 4 of 5 do not rotate.
    "smollm3": ("SmolLM3", LLAMA | dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=36, pad_token_id=2,
                                        num_hidden_layers=3, no_rope_layer_interval=2), "float32", 40, {}),
    "smollm3-tied": ("SmolLM3", LLAMA | dict(num_key_value_heads=1, num_hidden_layers=5, tie_word_embeddings=True,
                                             pad_token_id=2), "float16", 40, {}),
    "granite": ("Granite", LLAMA | MULTIPLIERS | dict(num_key_value_heads=1), "float16", 40, {}),
    "granite-tied": ("Granite", LLAMA | MULTIPLIERS | dict(num_attention_heads=5, attention_bias=True,
                                                           num_key_value_heads=5, tie_word_embeddings=True),
                     "bfloat16", 40, {}),
    "granite4": ("GraniteMoeHybrid", LLAMA | MULTIPLIERS | dict(
        num_key_value_heads=1, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=53,
        position_embedding_type="rope", layer_types=["attention", "attention"], mamba_n_heads=2, mamba_d_head=30),
                 "float16", 40, {}),
    "olmo2": ("Olmo2", LLAMA | dict(num_key_value_heads=1, pad_token_id=2), "float16", 40, {}),
    "olmo3": ("Olmo3", LLAMA | dict(pad_token_id=2, num_hidden_layers=3, sliding_window=11,
                                    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                                    rope_parameters=dict(
                                        full_attention=dict(rope_type="yarn", rope_theta=500.0, factor=4.0,
                                                            original_max_position_embeddings=24),
                                        sliding_attention=dict(rope_type="default", rope_theta=500.0))),
              "float16", 90, {}),
    "seed-oss": ("SeedOss", LLAMA | dict(num_key_value_heads=1, head_dim=14, attention_bias=True, pad_token_id=2,
                                         attention_out_bias=False), "float16", 40, {}),
    "glm4": ("Glm4", PHI3 | dict(head_dim=12, attention_bias=True), "float16", 40, {}),
    "exaone4": ("Exaone4", LLAMA | dict(num_key_value_heads=1, sliding_window=11, sliding_window_pattern="LLG",
                                        num_hidden_layers=4, tie_word_embeddings=True,
                                        layer_types=["sliding_attention", "sliding_attention", "full_attention",
                                                     "sliding_attention"], rope_scaling=LLAMA3), "float16", 60, {}),
    "exaone4-global": ("Exaone4", LLAMA | dict(sliding_window=None, sliding_window_pattern=None, head_dim=14,
                                               layer_types=["full_attention", "full_attention"]), "bfloat16", 40, {}),
    "ernie45": ("Ernie4_5", LLAMA | dict(num_key_value_heads=1, head_dim=14, tie_word_embeddings=True, pad_token_id=2),
                "float16", 40, {}),
    "hunyuan": ("HunYuanDenseV1", LLAMA | dict(num_key_value_heads=1, head_dim=14, pad_token_id=2,
                                               max_position_embeddings=32768, rope_scaling=dict(
        rope_type="dynamic", alpha=1000.0, factor=1.0, mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1)),
                "float16", 40, {}),
    "ministral3": ("Ministral3", LLAMA | dict(num_key_value_heads=1, head_dim=12, pad_token_id=2, rope_parameters=dict(
        rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=16, mscale=1.0,
        mscale_all_dim=1.0, llama_4_scaling_beta=0.4)), "float16", 90, {}),
    # Phi-4-mini: a share of the head, LongRoPE, few K/V heads, one matrix for embedding and head.
    "phi4-mini": ("Phi3", PHI3 | dict(original_max_position_embeddings=8, tie_word_embeddings=True, rope_scaling=dict(
        rope_type="longrope", partial_rotary_factor=0.75, short_factor=[1.0, 1.1, 1.2],
        long_factor=[1.0, 1.5, 4.0])), "float16", 40, {}),
    # As E2B: the last layers read keys and values of layers 1 and 2, and have a feed-forward network of twice the width.
    "gemma4": ("Gemma4", GEMMA4 | dict(num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3,
                                       num_kv_shared_layers=3, use_double_wide_mlp=True, num_key_value_heads=1,
                                       head_dim=10, global_head_dim=16, hidden_size_per_layer_input=6), "float16", 60,
               {}),
    # As 31B: values are keys in global layers, which have other heads; no embeddings of layers.
    "gemma4-large": ("Gemma4", GEMMA4 | dict(num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3,
                                             layer_types=["sliding_attention"] * 2 + ["full_attention"], head_dim=14,
                                             global_head_dim=20, num_global_key_value_heads=2, attention_k_eq_v=True,
                                             hidden_size_per_layer_input=0), "float16", 60, {}),
    "apertus": ("Apertus", LLAMA | dict(num_attention_heads=5, num_key_value_heads=1, pad_token_id=2,
                                        rope_parameters=LLAMA3 | dict(rope_theta=500.0)), "float16", 60, {}),
    # In 32 bits, for the converter computes gains and rates in the folder's type. States of
    # three key and six value heads in layers 1, 2 and 4; rows beyond two pages of 32.
    "qwen35": ("Qwen3_5", LLAMA | dict(num_key_value_heads=1, head_dim=16, num_hidden_layers=4, pad_token_id=2,
                                       linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=11,
                                       linear_value_head_dim=7, linear_conv_kernel_dim=4, layer_types=[
                                           "linear_attention", "linear_attention", "full_attention",
                                           "linear_attention"]), "float32", 90, {}),
    "qwen35-tied": ("Qwen3_5", LLAMA | dict(num_hidden_layers=2, head_dim=8, pad_token_id=2, tie_word_embeddings=True,
                                            linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=12,
                                            linear_value_head_dim=20, linear_conv_kernel_dim=3, layer_types=[
                                                "linear_attention", "full_attention"]), "float32", 40, {}),
    "qwen2moe": ("Qwen2Moe", LLAMA | MIXTURE | dict(num_key_value_heads=1), "float16", 40, {}),
    "qwen35moe": ("Qwen3_5Moe", LLAMA | MIXTURE | STATES | dict(pad_token_id=2), "float32", 90, {}),
    "qwen3next": ("Qwen3Next", LLAMA | MIXTURE | STATES | dict(norm_topk_prob=True), "float32", 90, {}),
    "glm4moe": ("Glm4Moe", LLAMA | GLM4MOE | dict(use_qk_norm=True, routed_scaling_factor=2.5), "float16", 40, {}),
    "glm4moe-air": ("Glm4Moe", LLAMA | GLM4MOE | dict(num_hidden_layers=2, tie_word_embeddings=True,
                                                      attention_bias=False), "bfloat16", 40, {}),
    "minimax-m2": ("MiniMaxM2", LLAMA | EXPERTS | dict(num_attention_heads=6, num_key_value_heads=2, head_dim=12,
                                                       num_local_experts=7, rope_parameters=dict(
        rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)), "float16", 40, {}),
    # Convolutions in layers 1, 2 and 4; 80 inner features are two thirds of it times 1.1, in sevens: 63.
    "lfm2": ("Lfm2", LLAMA | dict(num_key_value_heads=1, num_hidden_layers=5, intermediate_size=80, pad_token_id=2,
                                  block_multiple_of=7, block_ffn_dim_multiplier=1.1, tie_word_embeddings=True,
                                  layer_types=["conv", "conv", "full_attention", "conv", "full_attention"]),
             "float16", 90, {}),
    "lfm2moe": ("Lfm2Moe", LLAMA | dict(num_key_value_heads=1, num_hidden_layers=4, conv_L_cache=4, pad_token_id=2,
                                        num_dense_layers=1, num_experts=7, num_experts_per_tok=3,
                                        moe_intermediate_size=19, tie_word_embeddings=True,
                                        layer_types=["conv", "full_attention", "conv", "conv"]), "float16", 90, {}),
    # States of two key heads and eight value heads, in 32 bits for the converter's rates.
    "granitehybrid": ("GraniteMoeHybrid", LLAMA | MULTIPLIERS | HYBRID | dict(
        mamba_n_groups=2, num_local_experts=0, num_experts_per_tok=0, position_embedding_type="nope"), "float32", 90, {}),
    "granitehybrid-rope": ("GraniteMoeHybrid", LLAMA | MULTIPLIERS | HYBRID | dict(
        mamba_d_conv=3, num_local_experts=0, num_experts_per_tok=0, position_embedding_type="rope",
        tie_word_embeddings=True, layer_types=["linear_attention", "full_attention"], num_hidden_layers=2), "bfloat16",
                           60, {}),
    "granitehybridmoe": ("GraniteMoeHybrid", LLAMA | MULTIPLIERS | HYBRID | dict(
        num_local_experts=7, num_experts_per_tok=3, intermediate_size=19, shared_intermediate_size=23,
        position_embedding_type="nope"), "float32", 60, {}),
    # As V2 Lite, and as V2.
    "deepseek2": ("DeepseekV2", LLAMA | DEEPSEEK | dict(rope_parameters=dict(
        rope_type="yarn", rope_theta=500.0, factor=8.0, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707,
        original_max_position_embeddings=24)), "float16", 90, {}),
    "deepseek2-grouped": ("DeepseekV2", LLAMA | DEEPSEEK | dict(
        q_lora_rank=26, num_attention_heads=5, num_key_value_heads=5, n_routed_experts=8, n_group=4, topk_group=2, routed_scaling_factor=3.0,
        topk_method="group_limited_greedy", first_k_dense_replace=0, num_hidden_layers=2), "bfloat16", 40, {}),
    "deepseek3": ("DeepseekV3", LLAMA | DEEPSEEK | dict(
        q_lora_rank=26, num_attention_heads=6, num_key_value_heads=6, n_routed_experts=12, n_group=4, topk_group=2, num_experts_per_tok=4,
        n_shared_experts=1, num_mtp_layers=0, rope_parameters=dict(
            rope_type="yarn", rope_theta=500.0, factor=4.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
            original_max_position_embeddings=24)), "float16", 90, {}),
    "glm47flash": ("Glm4MoeLite", LLAMA | {key: value for key, value in DEEPSEEK.items() if "dense" not in key} | dict(
        q_lora_rank=26, kv_lora_rank=12, qk_nope_head_dim=22, v_head_dim=6, n_shared_experts=1, num_hidden_layers=2,
        routed_scaling_factor=1.8), "float16", 40, {}),
    # As 26B-A4B: a dense network and experts in every layer.
    "gemma4moe": ("Gemma4", GEMMA4 | dict(num_hidden_layers=2, num_key_value_heads=3, head_dim=10, global_head_dim=16,
                                          layer_types=["sliding_attention", "full_attention"],
                                          num_global_key_value_heads=1, attention_k_eq_v=True,
                                          hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=7,
                                          top_k_experts=3, moe_intermediate_size=19), "float16", 60, {}),
    "nemotron-h": ("NemotronH", LLAMA | NEMOTRON | dict(layers_block_type=[
        "linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]), "float32", 90, {}),
    "nemotron-h-moe": ("NemotronH", LLAMA | NEMOTRON | dict(
        n_groups=2, layers_block_type=["linear_attention", "moe", "full_attention", "moe"], n_routed_experts=7,
        num_experts_per_tok=3, moe_intermediate_size=19, moe_shared_expert_intermediate_size=23,
        routed_scaling_factor=2.5), "float32", 60, {}),
    # Layers 2 and 4 have experts, and 4 does not rotate.
    "llama4": ("Llama4", LLAMA | LLAMA4 | dict(interleave_moe_layer_step=2), "float16", 60, {}),
    # Queries of layers 2 and 4 grow from the eleventh position on.
    "llama4-tuned": ("Llama4", LLAMA | LLAMA4 | dict(no_rope_layer_interval=2, floor_scale=11, attn_scale=0.6,
                                                     use_qk_norm=False, tie_word_embeddings=True, rope_parameters=dict(
                                                         rope_theta=500.0) | LLAMA3), "bfloat16", 90, {}),
}


def classes_of(kind):
    """The classes of a configuration and of a model of it."""
    config = kind + ("Text" if kind.startswith(("Gemma", "Qwen3_5", "Llama4")) else "") + "Config"
    return getattr(transformers, config), getattr(transformers, kind + ("LMHeadModel" if kind == "GPT2" else "ForCausalLM"))


def randomize(model, generator):
    """Weights large enough that every part of the computation shows in the logits."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 2 and "emb" not in name and ".wte" not in name and ".wpe" not in name:
            inputs = weight.shape[0] if "c_" in name else weight.shape[1]
            weight.data = noise * 1.5 / inputs**0.5
        elif weight.dim() == 2:
            weight.data = noise * 0.7
        elif type(model).__name__.startswith("GptOss") and weight.dim() == 3:
            # Experts [in, out], and gates that are clamped here and there.
            weight.data = noise * (3.0 if "gate_up" in name else 1.0) / weight.shape[1]**0.5
        elif weight.dim() == 3:  # experts
            weight.data = noise * 1.5 / weight.shape[2]**0.5
        elif "bias" in name:
            weight.data = noise * 0.3
        elif name.endswith(("mamba.A_log", "mixer.A_log")):
            weight.data = noise * 0.5 - 2  # so that states last
        else:
            weight.data = 1 + noise * 0.2
    for name, weight in model.named_buffers():
        if name.endswith("layer_scalar"):
            weight.data = 0.7 + 0.2 * torch.randn(weight.shape, generator=generator)
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            weight.data = 0.2 * torch.randn(weight.shape, generator=generator)


def state_in_double(m):
    """The forward pass of a gated DeltaNet in float64, position by position. How near transformers' own is to it, which
    computes in float32 and in chunks, is the rounding that is kept."""
    f = torch.nn.functional

    def unit(x):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)

    def forward(hidden_states, **_):
        x = hidden_states[0]
        group = m.num_v_heads // m.num_k_heads
        if hasattr(m, "in_proj_qkv"):
            made, gate, beta, decay = m.in_proj_qkv(x), m.in_proj_z(x), m.in_proj_b(x), m.in_proj_a(x)
        else:  # Qwen3-Next: a key head's after another's
            values = group * m.head_v_dim
            parts = m.in_proj_qkvz(x).view(len(x), m.num_k_heads, -1).split([m.head_k_dim] * 2 + [values] * 2, -1)
            made, gate = torch.cat([part.flatten(1) for part in parts[:3]], -1), parts[3].flatten(1)
            beta, decay = (part.flatten(1) for part in m.in_proj_ba(x).view(len(x), m.num_k_heads, -1).split(group, -1))
        mixed = f.silu(m.conv1d(made.T[None])[0].T[:len(x)])
        q, k, v = mixed.split([m.key_dim, m.key_dim, m.value_dim], -1)
        q, k = (unit(y.view(len(x), m.num_k_heads, -1)).repeat_interleave(group, 1) for y in (q, k))
        v, beta = v.view(len(x), m.num_v_heads, -1), beta.sigmoid()
        decay = (-m.A_log.exp() * f.softplus(decay + m.dt_bias)).exp()
        state, out = x.new_zeros(m.num_v_heads, m.head_k_dim, m.head_v_dim), []
        for t in range(len(x)):
            state = state * decay[t][:, None, None]
            change = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t][:, :, None] * change[:, None]
            out.append(torch.einsum("hkv,hk->hv", state, q[t]) / m.head_k_dim**0.5)
        out = torch.stack(out)
        out = m.norm.weight * out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + m.norm.variance_epsilon)
        out = out * f.silu(gate.view(out.shape))
        return m.out_proj(out.flatten(1))[None]
    return forward


def mamba_in_double(m):
    """Likewise of Mamba 2."""
    f = torch.nn.functional

    def forward(hidden_states, **_):
        x = hidden_states[0]
        gate, mixed, steps = m.in_proj(x).split([m.intermediate_size, m.conv_dim, m.num_heads], -1)
        mixed = f.silu(m.conv1d(mixed.T[None])[0].T[:len(x)])
        v, k, q = mixed.split([m.intermediate_size] + [m.n_groups * m.ssm_state_size] * 2, -1)
        q, k = (y.view(len(x), m.n_groups, -1).repeat_interleave(m.num_heads // m.n_groups, 1) for y in (q, k))
        v, steps = v.view(len(x), m.num_heads, -1), f.softplus(steps + m.dt_bias)
        state, out = x.new_zeros(m.num_heads, m.ssm_state_size, m.head_dim), []
        for t in range(len(x)):
            state = state * (-m.A_log.exp() * steps[t]).exp()[:, None, None]
            state = state + k[t][:, :, None] * (steps[t][:, None] * v[t])[:, None]
            out.append(torch.einsum("hkv,hk->hv", state, q[t]) + m.D[:, None] * v[t])
        out = (torch.stack(out).flatten(1) * f.silu(gate)).view(len(x), m.n_groups, -1)
        out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + m.norm.variance_epsilon)
        return m.out_proj(out.flatten(1) * m.norm.weight)[None]
    return forward


def rotate_pairs(heads):
    """DeepSeek V2's rotation, and Llama 4's, of numbers of any precision; `heads`: the dimension of heads."""
    def rotate(q, k, turns):
        def turned(x):
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turns.unsqueeze(heads)).flatten(3).type_as(x)
        return turned(q), turned(k)
    return rotate


def in_double(model):
    """The model in float64, its norms, routers and states too (transformers computes those in float32)."""
    model = model.double()
    if type(model).__name__ in ("DeepseekV2ForCausalLM", "Llama4ForCausalLM"):
        heads = 1 if type(model).__name__.startswith("Deepseek") else 2
        sys.modules[type(model).__module__].apply_rotary_emb = rotate_pairs(heads)
    for module in model.modules():
        if type(module).__name__.endswith("GatedDeltaNet"):
            module.forward = state_in_double(module)
        if type(module).__name__.endswith(("MambaLayer", "Mamba2Mixer")):
            module.forward = mamba_in_double(module)
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter")):
            def route(x, bias=None, m=module):
                scores = torch.nn.functional.linear(x.flatten(0, -2), m.weight, getattr(m, "bias", None))
                bias = getattr(m, "e_score_correction_bias", bias)
                choice = scores.softmax(-1) if bias is None else scores.sigmoid() + bias
                groups = getattr(m, "num_group", None) or 1
                if groups > 1:  # DeepSeek's
                    parts = choice.view(len(choice), groups, -1)
                    best = parts.topk(1 if bias is None else 2)[0].sum(-1)
                    left = best < best.topk(m.topk_group)[0][:, -1:]
                    choice = parts.masked_fill(left[..., None], -math.inf).flatten(1)
                if bias is not None:  # sigmoids
                    ids = torch.topk(choice, m.top_k)[1]
                    weights = scores.sigmoid().gather(1, ids)
                    return scores, weights / weights.sum(-1, keepdim=True) * getattr(m, "routed_scaling_factor", 1), ids
                weights, ids = torch.topk(choice, m.top_k)
                if hasattr(m, "topk_method"):  # DeepSeek V2's
                    return scores, weights * m.routed_scaling_factor, ids
                if getattr(m, "norm_topk_prob", True):
                    weights = weights / weights.sum(-1, keepdim=True)
                return scores, weights, ids
            module.forward = route
        if type(module).__name__ == "Llama4Router":
            def choose(x, m=module):
                scores = torch.nn.functional.linear(x, m.weight)
                best, ids = scores.topk(m.top_k, -1)
                return torch.zeros_like(scores).scatter(1, ids, best.sigmoid()), scores
            module.forward = choose
        if type(module).__name__.endswith(("RMSNorm", "L2Norm")):
            def forward(x, m=module):
                gain, epsilon = getattr(m, "weight", 1.0), m.eps if hasattr(m, "eps") else m.variance_epsilon
                if type(m).__name__.startswith(("Gemma3", "Qwen3_5", "Qwen3Next")):
                    gain = 1 + gain
                return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))
            module.forward = forward
    return model


@torch.no_grad()
def logits(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0].double().numpy()


def greedy(model, prompt, count, rounding):
    """The tokens that a model in float64 goes on with, each of them ahead of the next best by more than rounding."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        row = np.sort(logits(model, ids)[-1])
        assert row[-1] - row[-2] > 100 * rounding, "too close: take another prompt"
        ids.append(int(logits(model, ids)[-1].argmax()))
    return ids[len(prompt):]


def rows_by_kind(tensor, heads, kv_heads):
    """Fused rows of one K/V head after another's (its queries, it, its values) as all queries, keys and values."""
    groups = tensor.reshape(kv_heads, heads // kv_heads + 2, -1, *tensor.shape[1:])
    parts = [groups[:, :-2], groups[:, -2], groups[:, -1]]
    return np.concatenate([part.reshape(-1, *tensor.shape[1:]) for part in parts])


def pair_rows(weight, heads):
    """Rows of Q and K as llama.cpp keeps Llama's: the inverse of half_split_rows."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def expert_tensors(state, gptoss):
    """A model's tensors as GGUF has those of experts: gate and up apart, which take turns in gpt-oss' columns."""
    for name, tensor in state.items():
        if gptoss and ".experts." in name:
            kind = "bias" if name.endswith("_bias") else "weight"
            parts = [("", slice(None))] if "down" in name else [("gate", slice(0, None, 2)), ("up", slice(1, None, 2))]
            for part, columns in parts:
                own = tensor[..., columns]
                own = own if kind == "bias" else own.swapaxes(1, 2).contiguous()
                yield name.removesuffix("_bias").replace("gate_up", part) + "." + kind, own
        elif gptoss and name.endswith("sinks"):
            yield name + ".weight", tensor
        elif name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            yield name.replace("gate_up_proj", "gate_proj.weight"), gate
            yield name.replace("gate_up_proj", "up_proj.weight"), up
        elif name.endswith("experts.down_proj"):
            yield name + ".weight", tensor
        else:
            yield name, tensor


def write_gguf(folder):
    """The folder's model as the gguf package names its tensors, in llama.cpp's order: rows of Q and K as they are
    (Qwen's and Gemma's order) or in pairs (Mixtral's), fused ones by kind; norms as they multiply."""
    import gguf
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kind = config.model_type.removesuffix("_text").replace("_", "").replace("mixtral", "llama")
    gemma = kind == "gemma3"
    gptoss = kind == "gptoss"
    arch = gguf.MODEL_ARCH["GPT_OSS" if gptoss else kind.upper()]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(os.path.join(folder, "model.gguf"), gguf.MODEL_ARCH_NAMES[arch])
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_kv_heads", getattr(config, "num_key_value_heads", heads))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(getattr(config, "max_position_embeddings", None) or config.seq_length)
    writer.add_embedding_length(config.hidden_size)
    inner = getattr(config, "intermediate_size", 4 * config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "ffn_hidden_size", None) or inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if config.model_type in ("mixtral", "gpt_oss"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "head_dim") and kind in ("gemma3", "qwen3", "qwen3moe", "llama", "gptoss"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if gemma:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(config.layer_types.index("full_attention") + 1)
    if gptoss:  # as llama.cpp's converter
        writer.add_sliding_window(config.sliding_window)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    if kind == "gptneox":
        writer.add_parallel_residual(config.use_parallel_residual)
        share = config.rope_parameters["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(config.hidden_size // heads * share))
    rope = getattr(config, "rope_parameters", {})
    rope = rope["full_attention"] if gemma else rope
    if rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "longrope":
        before = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(before)
        scale = config.max_position_embeddings / before
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(before)))
        for which in ("long", "short"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.layer_norm_epsilon)
    for name, tensor in expert_tensors(model.state_dict(), gptoss):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy() if tensor.dim() == 1 or name.endswith("bias") else tensor.to(torch.float16).numpy()
        assert (values == tensor.numpy()).all(), "f16 holds what the folder holds"
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            values = pair_rows(values, heads if "q_proj" in name else kv_heads)
        if "query_key_value" in name:
            values = rows_by_kind(values, heads, kv_heads)
        if gemma and tensor.dim() == 1:
            values = 1 + values
        known = name.removeprefix("transformer.") if kind == "bloom" else name
        writer.add_tensor(names.get_name(known, (".weight", ".bias")), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(folder):
    """The folder's model as llama.cpp's converter writes it, without a tokenizer. LLAMA_CPP: a checkout of llama.cpp."""
    import pathlib
    if os.environ["LLAMA_CPP"] not in sys.path:
        sys.path.insert(0, os.environ["LLAMA_CPP"])
    import conversion
    from conversion.base import gguf
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    family = conversion.get_model_class(config["architectures"][0])
    family.no_mtp = True  # Qwen 3.5's head that guesses
    types = gguf.LlamaFileType
    # By transformers' class every Nemotron-H would have experts.
    own = dict(hparams=config) if config["model_type"] == "nemotron_h" else {}
    model = family(pathlib.Path(folder), types.ALL_F32 if config["dtype"] == "float32" else types.MOSTLY_F16,
                   pathlib.Path(folder, "model.gguf"), **own)
    getattr(model, "impl", model).set_vocab = lambda: None
    model.fuse_gate_up_exps = folder.endswith("qwen3next")  # an option of the converter
    tokens = pathlib.Path(folder, "tokenizer.json")  # which Gemma's counts the tokens of
    tokens.write_text(json.dumps({"model": {"vocab": list(range(VOCAB))}, "added_tokens": []}))
    model.write()
    tokens.unlink()


def small_checkpoints(names):
    for index, (name, (kind, options, dtype, count, save)) in enumerate(CASES.items()):
        if names and name not in names:
            continue
        folder = os.path.join(OUT, name)
        shutil.rmtree(folder, ignore_errors=True)
        config_class, model_class = classes_of(kind)
        generator = torch.Generator().manual_seed(1000 + index)
        how = dict(attn_implementation="eager" if kind in ("Bloom", "GptOss") else "sdpa")
        if "num_experts_per_tok" in options or "num_experts" in options:
            how["experts_implementation"] = "eager"
        model = model_class(config_class(**options, **how)).eval()
        randomize(model, generator)
        model.to(getattr(torch, dtype)).save_pretrained(folder, **save)
        if kind == "Qwen3_5Moe":  # all experts of a layer in one tensor, as its authors' files have them
            safetensors.torch.save_file(model.state_dict(), os.path.join(folder, "model.safetensors"), {"format": "pt"})
        if kind in ("GraniteMoeHybrid", "Gemma4", "MiniMaxM2", "DeepseekV3", "Glm4MoeLite", "NemotronH"):  # as its authors' files say it
            path = os.path.join(folder, "config.json")
            with open(path, encoding="utf-8") as file:
                text = file.read()
            if kind == "Gemma4" and name != "gemma4-large":  # that one as transformers 5.24 writes it
                json_config = json.loads(text)
                del json_config["per_layer_config"]
                names_of_global = ("global_head_dim", "num_global_key_value_heads")
                json_config |= {key: options.get(key) for key in names_of_global}
                text = json.dumps(json_config, indent=2, sort_keys=True) + "\n"
            if kind == "MiniMaxM2":
                json_config = json.loads(text)
                json_config |= dict(rotary_dim=6, rope_theta=json_config.pop("rope_parameters")["rope_theta"])
                text = json.dumps(json_config, indent=2, sort_keys=True) + "\n"
            if kind in ("DeepseekV3", "Glm4MoeLite"):
                json_config = json.loads(text) | dict(scoring_func="sigmoid", topk_method="noaux_tc")
                if kind == "Glm4MoeLite":
                    del json_config["scoring_func"], json_config["mlp_layer_types"]
                    json_config["first_k_dense_replace"] = 1
                text = json.dumps(json_config, indent=2, sort_keys=True) + "\n"
            if kind == "NemotronH":
                json_config = json.loads(text)
                types = json_config.pop("layers_block_type", None) or json_config.pop("layer_types")
                short = dict(linear_attention="M", mlp="-", full_attention="*", moe="E")
                if "moe" not in types:
                    del json_config["num_experts_per_tok"], json_config["n_routed_experts"]
                json_config |= dict(num_hidden_layers=len(types), time_step_limit=[0.0, math.inf],
                                    hybrid_override_pattern="".join(short[type] for type in types))
                text = json.dumps(json_config, indent=2, sort_keys=True) + "\n"
            if kind == "GraniteMoeHybrid":
                text = text.replace('"full_attention"', '"attention"').replace('"linear_attention"', '"mamba"')
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        # As a user's program reads it.
        model = model_class.from_pretrained(folder, dtype=torch.float32, **how).eval()
        ids = torch.randint(0, VOCAB, (count,), generator=generator).tolist()
        single = logits(model, ids)
        double = logits(in_double(model), ids)
        double.astype("<f4").tofile(os.path.join(folder, "logits.f32"))
        rounding = float(np.abs(single - double).max())
        with open(os.path.join(folder, "oracle.json"), "w") as file:
            json.dump({"token_ids": ids, "fp32_rounding": rounding,
                       "greedy": greedy(model, ids[:PROMPT], GREEDY, rounding)}, file)
            file.write("\n")
        if name in GGUF:
            write_gguf(folder)
        if name in CONVERTED:
            convert(folder)
        print(name, "largest logit", np.abs(double).max(), "fp32 rounding", rounding)


# -- the default model --------------------------------------------------------------------------------

LENGTHS = [1024, 512, 512]  # of the sequences
TOP = 5
PROBES = 8


def half_split_rows(weight, heads):
    """GGUF's rows of Q and K, back in the order of Hugging Face files."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def default_model(path):
    import gguf
    reader = gguf.GGUFReader(path)

    def value(key):
        return reader.get_field(key).contents()

    heads, kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
             "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj"}
    state = {"model.embed_tokens.weight": tensors["token_embd.weight"],
             "model.norm.weight": tensors["output_norm.weight"],
             "lm_head.weight": tensors["token_embd.weight"]}
    for name, data in tensors.items():
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            if part in ("attn_q", "attn_k"):
                data = half_split_rows(data, heads if part == "attn_q" else kv_heads)
            state[f"model.layers.{layer}.{names[part]}.weight"] = data
    config = transformers.LlamaConfig(
        vocab_size=state["lm_head.weight"].shape[0], hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"), num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=True,
        max_position_embeddings=value("llama.context_length"), rope_theta=value("llama.rope.freq_base"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"), attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM(config).eval()
    # Copies: the file's arrays are views of a read-only mapping.
    model.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in state.items()})
    return model, value("tokenizer.ggml.tokens"), value("tokenizer.ggml.merges")


def text_ids(tokens, merges):
    """A real text, the project's licence, in the model's vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    with open("LICENSE", encoding="utf-8") as file:
        return tokenizer.encode(" ".join(file.read().split())).ids


def default_oracle(path):
    """Little-endian: u32 sequences, tokens of each, top, probes; f32 fp32_rounding; u16 ids of the probes; then
    for each sequence u16 token ids, and for each position: f32 log of the sum of exponentials, top ids u16 and
    logits f32, f32 logits of the probes."""
    model, tokens, merges = default_model(path)
    ids = text_ids(tokens, merges)
    assert len(ids) >= sum(LENGTHS), len(ids)
    parts, begin = [], 0
    for length in LENGTHS:
        parts.append(ids[begin:begin + length])
        begin += length
    singles = [logits(model, part).astype(np.float32) for part in parts]
    model = in_double(model)
    probes = np.random.default_rng(7).integers(0, len(tokens), PROBES)
    rounding, body = 0.0, b""
    for part, single in zip(parts, singles):
        rows = logits(model, part)
        rounding = max(rounding, float(np.abs(single - rows).max()))
        body += np.array(part, "<u2").tobytes()
        for row in rows:
            top = np.argsort(-row)[:TOP]
            peak = row.max()
            body += struct.pack("<f", peak + np.log(np.exp(row - peak).sum()))
            body += top.astype("<u2").tobytes() + row[top].astype("<f4").tobytes() + row[probes].astype("<f4").tobytes()
    with open(os.path.join(OUT, "default-model.bin"), "wb") as file:
        file.write(struct.pack(f"<{3 + len(LENGTHS)}I", len(LENGTHS), *LENGTHS, TOP, PROBES))
        file.write(struct.pack("<f", rounding) + probes.astype("<u2").tobytes() + body)
    print("default model: fp32 rounding", rounding)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] not in CASES:
        default_oracle(sys.argv[1])
    else:
        small_checkpoints(sys.argv[1:])
