#include "draw.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace te {
namespace {

constexpr int64_t kPiece = 512;      // scores of a unit of work
constexpr int64_t kStep = 8;         // random numbers of one step of the generator
constexpr int64_t kMostRanked = 256;  // a larger top-k is found by partitioning a copy
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr double kLn2 = 0.69314718055994531;

// Numbers kStep * i .. kStep * i + 7 of the stream: the halves of the words of Philox 4x64 with ten rounds (Salmon et al.,
// SC 2011), as NumPy's Philox(key=seed, counter=[0, 0, 0, position]) counts.
struct Numbers {
  uint32_t of[kStep];

  Numbers(uint64_t seed, uint64_t position, int64_t i) {
    __extension__ using Wide = unsigned __int128;
    uint64_t a = static_cast<uint64_t>(i) + 1, b = 0, c = 0, d = position, key = seed, other_key = 0;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const Wide x = static_cast<Wide>(a) * 0xD2E7470EE14C6C93u, y = static_cast<Wide>(c) * 0xCA5A826395121157u;
      a = static_cast<uint64_t>(y >> 64) ^ b ^ key;
      b = static_cast<uint64_t>(y);
      c = static_cast<uint64_t>(x >> 64) ^ d ^ other_key;
      d = static_cast<uint64_t>(x);
      key += 0x9E3779B97F4A7C15u;
      other_key += 0xBB67AE8584CAA73Bu;
    }
    const uint64_t words[] = {a, b, c, d};
    for (int64_t j = 0; j < kStep; ++j) of[j] = static_cast<uint32_t>(words[j / 2] >> (j % 2 * 32));
  }
  uint32_t largest() const { return *std::max_element(of, of + kStep); }
};

double gumbel(uint32_t number) {
  const double uniform = (static_cast<double>(number) + 0.5) * 0x1p-32;  // inside (0, 1)
  return -std::log(-std::log(uniform));
}

// Ones that a number begins with, up to 31. Noise grows with the number, and is at most `most_noise` of them:
// -ln(-ln u) <= -ln(1 - u), and 1 - u >= 2^-(ones + 1), or 2^-33. A little is added for rounding.
int leading_ones(uint32_t number) { return __builtin_clz(~number | 1); }
double most_noise(int ones) { return (ones < 31 ? ones + 1 : 33) * kLn2 + 1e-9; }
constexpr int kMostOnes = 31;

}  // namespace

struct Draw::Call final : Job {
  Call(Draw& d, const float* s, int64_t n, const Sampling& how, uint64_t at, const Kernels& k)
      : draw(d), raw(s), count(n), sampling(how), position(at), kernels(k) {}

  enum Phase : int64_t { kScale, kCut, kNoise };

  int64_t pieces() const { return (count + kPiece - 1) / kPiece; }
  int64_t end_of(int64_t piece) const { return std::min(count, (piece + 1) * kPiece); }

  int64_t units(int64_t phase) const override {
    switch (phase) {
      case kScale: return pieces();
      case kCut: return 1;
      case kNoise: return first.index < 0 ? 0 : pieces();
      default: return -1;
    }
  }

  void work(int64_t phase, const Part& part) const override {
    if (phase == kCut) return cut();
    for (int64_t piece = part.begin; piece < part.end; ++piece) phase == kScale ? scale(piece) : add_noise(piece);
  }

  void scale(int64_t piece) const;
  void cut() const;
  float least_of_top_k(int64_t k) const;
  float least_of_nucleus(float peak, float limit) const;
  int64_t gather(float least) const;
  void add_noise(int64_t piece) const;

  Draw& draw;
  const float* raw;
  const int64_t count;
  const Sampling& sampling;
  const uint64_t position;
  const Kernels& kernels;
  // What `cut` finds for the phase after it.
  mutable float limit = kNothing;  // scores below it are excluded
  mutable Noisy first{0.0, -1};    // the likeliest token with its noise, which others have to beat
  mutable float needed[kMostOnes + 1];  // the score from which on a number that begins with so many ones could do that
};

void Draw::Call::scale(int64_t piece) const {
  constexpr int64_t kLanes = 16;
  const int64_t begin = piece * kPiece, end = end_of(piece);
  const float divisor = static_cast<float>(sampling.temperature);
  float* scores = draw.scores_.data();
  float peaks[kLanes];
  std::fill_n(peaks, kLanes, kNothing);
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float score = std::max(kNothing, raw[i + lane] / divisor);  // in this order: NaN becomes -infinity
      scores[i + lane] = score;
      peaks[lane] = score > peaks[lane] ? score : peaks[lane];
    }
  for (; i < end; ++i) {
    scores[i] = std::max(kNothing, raw[i] / divisor);
    peaks[0] = scores[i] > peaks[0] ? scores[i] : peaks[0];
  }
  draw.peaks_.data()[piece] = *std::max_element(peaks, peaks + kLanes);
}

void Draw::Call::cut() const {
  const float* scores = draw.scores_.data();
  const float* peaks = draw.peaks_.data();
  const float* highest = std::max_element(peaks, peaks + pieces());
  const float peak = *highest;
  if (!(peak > kNothing)) return;
  const int64_t at = (highest - peaks) * kPiece;
  first.index = std::find(scores + at, scores + count, peak) - scores;
  first.value = static_cast<double>(peak) +
                gumbel(Numbers(sampling.seed, position, first.index / kStep).of[first.index % kStep]);
  if (sampling.top_k > 0 && sampling.top_k < count) limit = least_of_top_k(sampling.top_k);
  if (sampling.top_p < 1.0) limit = least_of_nucleus(peak, limit);
  if (sampling.min_p > 0.0) limit = std::max(limit, peak + static_cast<float>(std::log(sampling.min_p)));
  for (int ones = 0; ones <= kMostOnes; ++ones)
    needed[ones] = std::max(limit, std::nextafter(static_cast<float>(first.value - most_noise(ones)), kNothing));
}

float Draw::Call::least_of_top_k(int64_t k) const {
  const float* scores = draw.scores_.data();
  if (k <= kMostRanked) {
    kernels.log_softmax_top(scores, count, k, draw.top_values_.data(), draw.top_indices_.data());
    return scores[draw.top_indices_.data()[k - 1]];
  }
  float* copy = draw.gathered_.data();
  std::copy_n(scores, count, copy);
  std::nth_element(copy, copy + k - 1, copy + count, std::greater<float>());
  return copy[k - 1];
}

// The least score of the smallest set of likeliest tokens that holds the share top_p of those from `limit` on.
float Draw::Call::least_of_nucleus(float peak, float limit) const {
  const float* scores = draw.scores_.data();
  const float* chosen = draw.gathered_.data();
  int64_t chosen_count = 0;
  double total = 0.0;  // of probabilities; that of the peak is 1
  if (limit > kNothing) {
    chosen_count = gather(limit);
    for (int64_t i = 0; i < chosen_count; ++i) total += std::exp(static_cast<double>(chosen[i] - peak));
  } else {
    float log_share = 0.0f;  // of the peak
    kernels.log_softmax_top(scores, count, 1, &log_share, draw.top_indices_.data());
    total = std::exp(-static_cast<double>(log_share));
    // all tokens below this together hold less than what may be left out
    chosen_count = gather(peak + static_cast<float>(std::log((1.0 - sampling.top_p) * total / static_cast<double>(count))));
  }
  float* sorted = draw.gathered_.data();
  std::sort(sorted, sorted + chosen_count, std::greater<float>());
  double mass = 0.0;
  int64_t kept = 0;
  while (kept < chosen_count && mass < sampling.top_p * total) mass += std::exp(static_cast<double>(sorted[kept++] - peak));
  return kept > 0 ? sorted[kept - 1] : peak;
}

// Scores from `least` on, in the order of their tokens; how many.
int64_t Draw::Call::gather(float least) const {
  const float* scores = draw.scores_.data();
  float* out = draw.gathered_.data();
  int64_t found = 0;
  for (int64_t piece = 0; piece < pieces(); ++piece) {
    if (!(draw.peaks_.data()[piece] >= least)) continue;
    for (int64_t i = piece * kPiece; i < end_of(piece); ++i) {
      out[found] = scores[i];
      found += scores[i] >= least;
    }
  }
  return found;
}

void Draw::Call::add_noise(int64_t piece) const {
  const float* scores = draw.scores_.data();
  const float least = needed[kMostOnes];
  Noisy best = first;
  const int64_t end = draw.peaks_.data()[piece] >= least ? end_of(piece) : 0;
  for (int64_t i = piece * kPiece; i < end; i += kStep) {
    const int64_t here = std::min(kStep, end - i);
    float highest = kNothing;
    for (int64_t j = 0; j < here; ++j) highest = scores[i + j] > highest ? scores[i + j] : highest;
    if (highest < least) continue;
    const Numbers numbers(sampling.seed, position, i / kStep);
    if (highest < needed[leading_ones(numbers.largest())]) continue;
    for (int64_t j = 0; j < here; ++j) {
      if (!(scores[i + j] >= needed[leading_ones(numbers.of[j])])) continue;
      const Noisy noisy{static_cast<double>(scores[i + j]) + gumbel(numbers.of[j]), i + j};
      if (noisy.beats(best)) best = noisy;
    }
  }
  draw.found_.data()[piece] = best;
}

int64_t Draw::token(const float* scores, int64_t count, const Sampling& sampling, uint64_t position, const Kernels& kernels,
                    Team& team) {
  make_room(count);
  const Call call(*this, scores, count, sampling, position, kernels);
  team.run(call);
  if (call.first.index < 0) return -1;
  Noisy best = call.first;
  for (int64_t piece = 0; piece < call.pieces(); ++piece)
    if (found_.data()[piece].beats(best)) best = found_.data()[piece];
  return best.index;
}

void Draw::make_room(int64_t count) {
  if (scores_.size() >= count) return;
  const int64_t pieces = (count + kPiece - 1) / kPiece;
  scores_ = Buffer<float>(count);
  gathered_ = Buffer<float>(count);
  peaks_ = Buffer<float>(pieces);
  found_ = Buffer<Noisy>(pieces);
  top_values_ = Buffer<float>(kMostRanked);
  top_indices_ = Buffer<int64_t>(kMostRanked);
}

}  // namespace te
