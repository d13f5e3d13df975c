// The shapes of random models. Thread safety: constants.
#pragma once

#include <cstdint>
#include <string_view>

namespace treadle {

struct Shape {
  std::string_view name;
  const char* architecture;
  int64_t layers, hidden, heads, kv_heads, ffn, vocab, context;
  bool tied_head;
  double rope_base = 10000;
  double rope_factor = 0;  // of Llama-3's scaling; 0: none
  int64_t head_dim = 0;    // 0: heads divide the hidden size
  int64_t layer_norms = 2;
  int64_t window = 0;  // of layers that are local: all, or but one of Architecture::global_every
  int64_t experts = 0, experts_per_token = 0;
  int64_t state_key_heads = 0, state_heads = 0;  // of 128 elements each; of Mamba 2: values of 64
  int64_t attention_every = 4;                   // the last of so many layers keeps no state
};

// Sources: each model's config.json; orca-...: ORCA's Table 1, the rest as GPT-3 (heads of 128,
// 2048 positions) with GPT-2's vocabulary.
inline constexpr Shape kShapes[] = {
    {"llama-3.1-8b", "llama", 32, 4096, 32, 8, 14336, 128256, 131072, false, 500000, 8},
    {"llama-3.2-1b", "llama", 16, 2048, 32, 8, 8192, 128256, 131072, true, 500000, 32},
    {"smollm2-135m", "llama", 30, 576, 9, 3, 1536, 49152, 8192, true, 100000},
    {"tinyllama-1.1b", "llama", 22, 2048, 32, 4, 5632, 32000, 2048, false},
    {"orca-13b", "gpt2", 40, 5120, 40, 40, 20480, 50257, 2048, true},
    {"orca-101b", "gpt2", 80, 10240, 80, 80, 40960, 50257, 2048, true},
    {"orca-175b", "gpt2", 96, 12288, 96, 96, 49152, 50257, 2048, true},
    {"orca-341b", "gpt2", 120, 15360, 120, 120, 61440, 50257, 2048, true},
    {"qwen2.5-0.5b", "qwen2", 24, 896, 14, 2, 4864, 151936, 32768, true, 1e6},
    {"qwen3-0.6b", "qwen3", 28, 1024, 16, 8, 3072, 151936, 40960, true, 1e6, 0, 128},
    {"mistral-7b", "llama", 32, 4096, 32, 8, 14336, 32000, 32768, false, 10000, 0, 0, 2, 4096},
    {"gemma-3-270m", "gemma3", 18, 640, 4, 1, 2048, 262144, 32768, true, 1e6, 0, 256, 2, 512},
    {"gemma-4-e4b", "gemma4", 42, 2560, 8, 2, 10240, 262144, 131072, true, 1e6, 0, 512, 2, 512},
    {"gemma-4-26b-a4b", "gemma4moe", 30, 2816, 16, 2, 704, 262144, 262144, true, 1e6, 0, 512, 2,
     1024, 128, 8},
    {"gpt2-124m", "gpt2", 12, 768, 12, 12, 3072, 50257, 1024, true},
    {"pythia-1.4b", "gptneox", 24, 2048, 16, 16, 8192, 50304, 2048, false},
    {"opt-1.3b", "opt", 24, 2048, 32, 32, 8192, 50272, 2048, true},
    {"phi-3-mini", "phi3", 32, 3072, 32, 32, 8192, 32064, 4096, false},
    {"bloom-560m", "bloom", 24, 1024, 16, 16, 4096, 250880, 2048, true},
    {"falcon-7b", "falcon", 32, 4544, 71, 1, 18176, 65024, 2048, true, 10000, 0, 0, 1},
    {"mixtral-8x7b", "mixtral", 32, 4096, 32, 8, 14336, 32000, 32768, false, 1e6, 0, 0, 2, 0, 8, 2},
    {"qwen3-30b-a3b", "qwen3moe", 48, 2048, 32, 4, 768, 151936, 40960, false, 1e6, 0, 128, 2, 0,
     128, 8},
    {"gpt-oss-20b", "gpt-oss", 24, 2880, 64, 8, 2880, 201088, 131072, false, 150000, 0, 64, 2, 128,
     32, 4},
    {"granite-3.3-2b", "granite", 40, 2048, 32, 8, 8192, 49159, 131072, true, 1e7},
    {"olmo-3-7b", "olmo2", 32, 4096, 32, 32, 11008, 100278, 65536, false, 500000, 0, 0, 2, 4096},
    {"seed-oss-36b", "seed_oss", 64, 5120, 80, 8, 27648, 155136, 524288, false, 1e7, 0, 128},
    {"glm-4-9b", "glm4", 40, 4096, 32, 2, 13696, 151552, 32768, false, 10000, 0, 128},
    {"exaone-4-1.2b", "exaone4", 30, 2048, 32, 8, 4096, 102400, 65536, true, 1e6, 16, 64},
    {"ernie-4.5-0.3b", "ernie4_5", 18, 1024, 16, 2, 3072, 103424, 131072, true, 500000, 0, 128},
    {"hunyuan-0.5b", "hunyuan-dense", 24, 1024, 8, 4, 3584, 120818, 32768, true, 11158840, 0, 128},
    {"ministral-3-3b", "mistral3", 26, 3072, 32, 8, 9216, 131072, 16384, true, 1e6, 0, 128},
    {"qwen3.5-0.8b", "qwen35", 24, 1024, 8, 2, 3584, 248320, 262144, true, 1e7, 0, 256, 2, 0, 0, 0,
     16, 16},
    {"qwen3.5-4b", "qwen35", 32, 2560, 16, 4, 9216, 248320, 262144, true, 1e7, 0, 256, 2, 0, 0, 0,
     16, 32},
    {"qwen3.6-35b-a3b", "qwen35moe", 40, 2048, 16, 2, 512, 248320, 262144, false, 1e7, 0, 256, 2, 0,
     256, 8, 16, 32},
    {"qwen3-next-80b-a3b", "qwen3next", 48, 2048, 16, 2, 512, 151936, 262144, false, 1e7, 0, 256, 2,
     0, 512, 10, 16, 32},
    {"lfm2-1.2b", "lfm2", 16, 2048, 32, 8, 8192, 65536, 128000, true,
     1e6,         0,      0,  2,    0,  0, 0,    0,     0,      3},
    {"granite-4.0-h-micro",
     "granitehybrid",
     40,
     2048,
     32,
     8,
     8192,
     100352,
     131072,
     true,
     10000,
     0,
     0,
     2,
     0,
     0,
     0,
     1,
     64,
     10},
    {"granite-4.0-h-tiny",
     "granitehybridmoe",
     40,
     1536,
     12,
     4,
     512,
     100352,
     131072,
     true,
     10000,
     0,
     0,
     2,
     0,
     64,
     6,
     1,
     48,
     10},
    {"glm-4.5-air", "glm4moe", 46, 4096, 96, 8, 1408, 151552, 131072, false, 1e6, 0, 128, 2, 0, 128,
     8},
    {"minimax-m2", "minimax-m2", 62, 3072, 48, 8, 1536, 200064, 196608, false, 5e6, 0, 128, 2, 0,
     256, 8},
    {"deepseek-v2-lite", "deepseek2", 27, 2048, 16, 1, 1408, 102400, 163840, false, 10000, 0, 0, 2,
     0, 64, 6},
    {"apertus-8b", "apertus", 32, 4096, 32, 8, 21504, 131072, 65536, false, 12e6, 8},
    {"nemotron-h-8b",
     "nemotron_h",
     52,
     4096,
     32,
     8,
     21504,
     131072,
     8192,
     false,
     10000,
     0,
     128,
     2,
     0,
     0,
     0,
     8,
     128,
     14},
    {"llama-4-maverick", "llama4", 48, 5120, 40, 8, 8192, 202048, 8192, false, 500000, 0, 128, 2, 0,
     128, 1},
    {"smollm3-3b", "smollm3", 36, 2048, 16, 4, 11008, 128256, 65536, true, 5e6},
};

}  // namespace treadle
