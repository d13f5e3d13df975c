// This instruction set's table.
#include "kernels/cpu/ops/op_kernels.h"

#include "kernels/cpu/isa_kernels.h"

namespace treadle::TREADLE_ISA {

const OpKernels kOpKernels = {
    .rms_norm = RmsNorm,
    .layer_norm = LayerNorm,
    .rotate_store = RotateStore,
    .attention = Attention,
    .combine_attention = CombineAttention,
    .attention_scratch_floats = AttentionScratchFloats,
    .attention_partial_floats = AttentionPartialFloats,
    .swiglu = SwiGlu,
    .gelu = Gelu,
    .exp = ExpInto,
    .sample = {.max = MaxLogit,
               .first_at_least = FirstAtLeast,
               .sum_exp = SumExp,
               .gather = GatherBand},
};

}  // namespace treadle::TREADLE_ISA
