// Row-wise operations, for any instruction set. Each works on one row (or one head) alone.
#pragma once

#include <limits>

#include "kernels.h"

namespace te {
namespace {

// exp(x) to about 1 ulp: x = n ln 2 + r, a polynomial of degree 6 in r (Taylor terms), times 2^n. Below -87 it is exp(-87).
template <class S>
inline typename S::F exp_approx(typename S::F x) {
  using F = typename S::F;
  x = S::min(S::max(x, S::set1(-87.0f)), S::set1(88.0f));
  const typename S::I n = S::round(S::mul(x, S::set1(1.44269504f)));
  const F nf = S::to_float(n);
  F r = S::fma(nf, S::set1(-0.693145752f), x);       // ln 2 in two parts: the first has trailing zeros,
  r = S::fma(nf, S::set1(-1.42860677e-6f), r);       // so n * part is exact
  F p = S::set1(1.0f / 720);
  p = S::fma(p, r, S::set1(1.0f / 120));
  p = S::fma(p, r, S::set1(1.0f / 24));
  p = S::fma(p, r, S::set1(1.0f / 6));
  p = S::fma(p, r, S::set1(0.5f));
  p = S::fma(p, r, S::set1(1.0f));
  p = S::fma(p, r, S::set1(1.0f));
  return S::scale2(p, n);
}

template <class S>
void quantise_row(const float* x, int64_t n, const Activations& a, int64_t row, int64_t block0) {
  constexpr int kParts = kBlock / S::kLanes;
  for (int64_t b = 0; b < n / kBlock; ++b, x += kBlock) {
    typename S::F part[kParts];
    typename S::F peak = S::zero();
    for (int i = 0; i < kParts; ++i) {
      part[i] = S::load(x + i * S::kLanes);
      peak = S::max(peak, S::abs(part[i]));
    }
    const float largest = S::max_lane(peak);
    const typename S::F most = S::set1(127.0f), least = S::set1(-127.0f);
    const typename S::F inverse = S::set1(largest > 0.0f ? 127.0f / largest : 0.0f);
    int8_t* q = a.block(block0 + b, row);
    typename S::I total = S::iset1(0);
    for (int i = 0; i < kParts; ++i) {
      // NaN, and infinity where `largest` is below 2^-121, would overflow the sum. Of NaN and a number max gives the second.
      const typename S::I rounded = S::round(S::min(S::max(S::mul(part[i], inverse), least), most));
      S::store_int8(q + i * S::kLanes, rounded);
      total = S::iadd(total, rounded);
    }
    const int32_t sum = S::isum(total);
    const float scale = largest / 127.0f;
    *a.block_info(block0 + b, row) = {scale, scale * static_cast<float>(sum), -128 * sum, -8 * sum};
  }
}

template <class S>
void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  typename S::F even = S::zero(), odd = S::zero();
  int64_t i = 0;
  for (; i + 2 * S::kLanes <= n; i += 2 * S::kLanes) {
    const typename S::F a = S::load(x + i), b = S::load(x + i + S::kLanes);
    even = S::fma(a, a, even);
    odd = S::fma(b, b, odd);
  }
  for (; i < n; i += S::kLanes) {
    const typename S::F a = S::load(x + i);
    even = S::fma(a, a, even);
  }
  const float mean = S::sum(S::add(even, odd)) / static_cast<float>(n);
  const typename S::F inverse = S::set1(1.0f / __builtin_sqrtf(mean + eps));
  for (i = 0; i < n; i += S::kLanes) S::store(out + i, S::mul(S::mul(S::load(x + i), inverse), S::load(weight + i)));
}

template <class S>
void add_scaled(float* x, const float* y, float scale, int64_t n) {
  const typename S::F s = S::set1(scale);
  for (int64_t i = 0; i < n; i += S::kLanes) S::store(x + i, S::fma(S::load(y + i), s, S::load(x + i)));
}

template <class S>
void silu_mul(float* gate, const float* up, int64_t n) {
  for (int64_t i = 0; i < n; i += S::kLanes) {
    const typename S::F g = S::load(gate + i);
    const typename S::F sigmoid = S::div(S::set1(1.0f), S::add(S::set1(1.0f), exp_approx<S>(S::sub(S::zero(), g))));
    S::store(gate + i, S::mul(S::mul(g, sigmoid), S::load(up + i)));
  }
}

template <class S>
void rope(float* x, const float* cos, const float* sin, int64_t head_dim, float scale) {
  const int64_t half = head_dim / 2;
  const typename S::F s = S::set1(scale);
  for (int64_t i = 0; i < half; i += S::kLanes) {
    const typename S::F a = S::load(x + i), b = S::load(x + half + i), c = S::load(cos + i), d = S::load(sin + i);
    S::store(x + i, S::mul(S::sub(S::mul(a, c), S::mul(b, d)), s));
    S::store(x + half + i, S::mul(S::add(S::mul(b, c), S::mul(a, d)), s));
  }
}

template <class S>
void store_bf16(const float* x, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; i += S::kLanes) S::store_bf16(out + i, S::load(x + i));
}

// Keeps the k largest in order while scanning; groups of four vectors below the smallest kept are skipped.
template <class S>
void largest(const float* x, int64_t n, int64_t k, float* values, int64_t* indices) {
  constexpr int64_t kGroup = 4 * S::kLanes;
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += kGroup) {
    const bool whole = i + kGroup <= n;
    if (whole && kept == k) {
      const typename S::F low = S::max(S::load(x + i), S::load(x + i + S::kLanes));
      const typename S::F high = S::max(S::load(x + i + 2 * S::kLanes), S::load(x + i + 3 * S::kLanes));
      if (S::max_lane(S::max(low, high)) <= values[k - 1]) continue;
    }
    const int64_t end = whole ? i + kGroup : n;
    for (int64_t j = i; j < end; ++j) {
      if (kept == k && !(x[j] > values[k - 1])) continue;
      int64_t at = kept < k ? kept++ : k - 1;
      for (; at > 0 && x[j] > values[at - 1]; --at) {
        values[at] = values[at - 1];
        indices[at] = indices[at - 1];
      }
      values[at] = x[j];
      indices[at] = j;
    }
  }
}

// Tiles come in any order, so that the lower index among equals is not always the earlier one. Nearly all of them lie
// below what was found before and are passed over together.
template <class S>
void note_peaks(const float* x, int64_t ldx, int64_t rows, int64_t channel, int64_t width, Peak* peaks) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  const typename S::F lowest = S::set1(-kLargest);
  for (int64_t r = 0; r < rows; ++r, x += ldx) {
    Peak& peak = peaks[r];
    const typename S::F found = S::set1(peak.value);
    bool below = width == kTile;
    for (int i = 0; i < kTile && below; i += S::kLanes) below = S::all_between(S::load(x + i), lowest, found);
    if (below) continue;
    for (int64_t i = 0; i < width; ++i) {
      const int64_t index = channel + i;
      if (!(__builtin_fabsf(x[i]) <= kLargest))
        peak.spoilt = true;
      else if (x[i] > peak.value || (x[i] == peak.value && index < peak.index))
        peak = {x[i], peak.spoilt, index};
    }
  }
}

template <class S>
void log_softmax_top(const float* x, int64_t n, int64_t k, float* values, int64_t* indices) {
  largest<S>(x, n, k, values, indices);
  const typename S::F peak = S::set1(values[0]);
  typename S::F sum = S::zero();
  int64_t i = 0;
  for (; i + S::kLanes <= n; i += S::kLanes) sum = S::add(sum, exp_approx<S>(S::sub(S::load(x + i), peak)));
  float total = S::sum(sum);
  for (; i < n; ++i) total += __builtin_expf(x[i] - values[0]);
  const float log_total = values[0] + __builtin_logf(total);
  for (int64_t j = 0; j < k; ++j) values[j] -= log_total;
}

}  // namespace
}  // namespace te
