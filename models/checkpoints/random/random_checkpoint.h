// A model of a named shape with random weights, to measure speed where no checkpoint of that shape
// is at hand. The text that it makes means nothing, and there is no tokenizer: token ids only.
//
//   random:llama-3.1-8b                       as published
//   random:llama-3.2-1b,layers=2,vocab=1000   changed: layers, hidden, heads, kv-heads, ffn, vocab,
//                                             context
//
// Weights are bf16, uniform with a standard deviation of 0.02 (GPT-2's), so that activations stay
// finite at any size, and the same wherever a model of the same sizes is opened (recipe() names
// them). They are never all in memory: every tensor is a part of one block of random numbers,
// mapped as often as the largest tensor takes. Gains of norms are 1, but for six features that are
// twenty times larger: the outliers of real models from 6.7B parameters on (Dettmers, chapter 2),
// without which LLM.int8() would have less to do.
//
// Opened by Checkpoint::Open. Thread safety: as Checkpoint.
#pragma once

#include <string>

namespace treadle {

// The shapes that there are: "llama-3.1-8b, llama-3.2-1b, ..."
std::string RandomShapes();

}  // namespace treadle
