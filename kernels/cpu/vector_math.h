// exp and what follows from it, on 16 lanes, without libm: range reduction and a polynomial of
// explicit FMA, so that every instruction set gives equal bits (docs/design.md, Numerics).
//
// Only for sources that are compiled once per instruction set; see simd.h.
#pragma once

#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {
namespace {

// exp(x) within 1 ulp where the result is normal. Exact: exp(0) = 1, exp(-inf) = 0, exp(+inf) =
// +inf, NaN stays NaN. Denormal results are rounded, not flushed; below -103.98 the result is 0.
//
// x = n ln 2 + r with |r| <= ln(2) / 2; exp(r) = 1 + (r + r^2 q(r)), q of degree 4 fitted for the
// least relative error (3e-9). Adding 1 last gives exp(0) = 1.
struct Power {
  Vec tail, n;  // exp(x) = 2^n (1 + tail)
};
TREADLE_SIMD Power PowerOf(Vec x) {
  // NaN is the second operand, so it passes.
  x = Min(Broadcast(89.0f), Max(Broadcast(-104.0f), x));
  const Vec n = Round(Mul(x, Broadcast(0x1.715476p+0f)));  // 1 / ln 2
  Vec r = Fnma(n, Broadcast(0x1.62e43p-1f), x);            // ln 2 in two parts
  r = Fnma(n, Broadcast(-0x1.05c61p-29f), r);
  Vec q = Broadcast(0x1.6a23cep-10f);
  q = Fma(q, r, Broadcast(0x1.123a2p-7f));
  q = Fma(q, r, Broadcast(0x1.5558f2p-5f));
  q = Fma(q, r, Broadcast(0x1.555492p-3f));
  q = Fma(q, r, Broadcast(0x1.fffffcp-2f));
  return {Fma(Mul(r, r), q, r), n};
}
// Zeros are scaled where the result is 0, as for positions that attention does not see: rounding to
// 0 takes a processor a hundred times as long.
TREADLE_SIMD Vec Exp(Vec x) {
  const Power p = PowerOf(x);
  const Vec one = Add(Broadcast(1.0f), p.tail);
  return Scale(Select(Less(x, Broadcast(-104.0f)), Zero(), one), p.n);
}

// exp(x) - 1 within 2 ulp, for x of at most 0: what is left of 1 - 2^n is exact.
TREADLE_SIMD Vec Expm1(Vec x) {
  const Power p = PowerOf(x);
  const Vec one = Broadcast(1.0f);
  return Add(Scale(p.tail, p.n), Sub(Scale(one, p.n), one));
}

// x / (1 + exp(-t)): x times the logistic function of t. 0 or -0 where exp(-t) overflows.
TREADLE_SIMD Vec TimesSigmoid(Vec x, Vec t) {
  return Div(x, Add(Broadcast(1.0f), Exp(Sub(Zero(), t))));
}

// x * sigmoid(x), the gate of SwiGLU (Shazeer 2020).
TREADLE_SIMD Vec Silu(Vec x) { return TimesSigmoid(x, x); }

// 0.5 x (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3) (Hendrycks and Gimpel 2016). As
// (1 + tanh(u)) / 2 is the logistic function of 2u, no tanh is needed and nothing cancels.
TREADLE_SIMD Vec GeluTanh(Vec x) {
  const Vec square = Mul(x, x);
  const Vec inner = Fma(Mul(Broadcast(0.044715f), square), x, x);
  return TimesSigmoid(x, Mul(Broadcast(0x1.988454p+0f), inner));  // 2 sqrt(2 / pi)
}

// 0.5 x (1 + erf(x / sqrt(2))) within 3 |x| 2^-24. With a = |x| / sqrt(2) and t = 1 / (1 + a / 2),
// erfc(a) = t exp((t - 1) p(t) - a^2), p of degree 6 fitted to erfc on [0, 6.5] for the least error
// (5e-8 of it); beyond, erfc is 0 to float. erfc(0) = 1 exactly.
TREADLE_SIMD Vec GeluErf(Vec x) {
  const Vec a = Mul(Max(x, Sub(Zero(), x)), Broadcast(0x1.6a09e6p-1f));  // 1 / sqrt(2)
  const Vec t = Div(Broadcast(1.0f), Fma(Broadcast(0.5f), a, Broadcast(1.0f)));
  Vec p = Broadcast(-0x1.6dd75ep-4f);
  p = Fma(p, t, Broadcast(0x1.b47ecap-3f));
  p = Fma(p, t, Broadcast(0x1.0c8d84p-4f));
  p = Fma(p, t, Broadcast(-0x1.d44692p-2f));
  p = Fma(p, t, Broadcast(0x1.3dde1ep-6f));
  p = Fma(p, t, Broadcast(0x1.e64ee8p-3f));
  p = Fma(p, t, Broadcast(0x1.448f78p+0f));
  const Vec power = Fma(Sub(t, Broadcast(1.0f)), p, Sub(Zero(), Mul(a, a)));
  // x erfc(a) / 2 is the answer for negative x, and what x lacks of it else.
  const Vec half = Mul(Mul(Mul(Broadcast(0.5f), x), t), Exp(power));
  return Sub(Max(x, Zero()), Max(half, Sub(Zero(), half)));
}

}  // namespace
}  // namespace treadle::TREADLE_ISA
