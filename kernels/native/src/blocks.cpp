#include "blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "fit.h"

namespace te {

float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 31u;
  const uint32_t mantissa = h & 0x3ffu;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {  // zero or subnormal: mantissa * 2^-24 is exact in fp32
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &magnitude, 4);
    bits |= sign;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x7f800000u) return static_cast<uint16_t>(sign | 0x7c00u | (magnitude > 0x7f800000u ? 0x200u : 0u));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds past 65504
  if (magnitude < 0x38800000u) {                                              // subnormal: let the FPU round at 2^-24
    float m;
    std::memcpy(&m, &magnitude, 4);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(m * 16777216.0f)));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

Weight weight_shape(Format format, int64_t n, int64_t k) {
  Weight w;
  w.format = format;
  w.n = n;
  w.k = k;
  w.blocks = k / kBlock;
  w.tiles = (n + kTile - 1) / kTile;
  const int64_t scale_bytes = 2 * kTile * (format == Format::Q4_1 ? 2 : 1);
  const int64_t bound_bytes = format == Format::Split ? kTile * 4 : 0;
  w.tile_bytes = round_up(w.blocks * (quant_bytes(format) + scale_bytes) + bound_bytes, kAlign);
  return w;
}

int64_t weight_bytes(const Weight& w) {
  return w.tiles * (w.tile_bytes + (w.format == Format::Split ? w.blocks * kLowBytes : 0));
}

namespace {

// Where (channel, block) of a packed matrix lives.
struct Place {
  uint8_t* quants;
  uint16_t* scale;
  uint16_t* minimum;
  int channel;
};

Place place(const Weight& w, uint8_t* data, int64_t row, int64_t block) {
  const int64_t tile = row / kTile;
  const int channel = static_cast<int>(row % kTile);
  uint8_t* base = data + tile * w.tile_bytes;
  auto* scales = reinterpret_cast<uint16_t*>(base + w.blocks * quant_bytes(w.format)) + block * kTile + channel;
  return {base + block * quant_bytes(w.format), scales, scales + w.blocks * kTile, channel};
}

// In 4 bits a 64-byte register holds the k-groups g (low nibbles) and g + 1 (high nibbles), g even.
void store_nibble(uint8_t* quants, int channel, int i, uint32_t value) {
  const int group = i / 4;
  uint8_t& byte = quants[(group / 2) * 64 + channel * 4 + i % 4];
  byte = static_cast<uint8_t>(group % 2 == 0 ? (byte & 0xf0u) | value : (byte & 0x0fu) | (value << 4));
}

uint32_t load_nibble(const uint8_t* quants, int channel, int i) {
  const int group = i / 4;
  const uint8_t byte = quants[(group / 2) * 64 + channel * 4 + i % 4];
  return group % 2 == 0 ? byte & 15u : byte >> 4;
}

void store_byte(uint8_t* quants, int channel, int i, int value) {
  quants[(i / 4) * 64 + channel * 4 + i % 4] = static_cast<uint8_t>(value + 128);
}

// The `g`-th of four k-groups of a half block, at one channel and input: `at` says where in their 64 bytes.
uint32_t load_upper(const uint8_t* half, int g, int at) {
  if (g < 3) return half[g * 64 + at] & 0xfcu;
  return (half[at] & 3u) << 6 | (half[64 + at] & 3u) << 4 | (half[128 + at] & 3u) << 2;
}

uint32_t load_split(const uint8_t* upper, const uint8_t* low, int channel, int i) {
  const int half = i / 16, g = i / 4 % 4, at = channel * 4 + i % 4;
  return load_upper(upper + half * 192, g, at) | (low[half * 64 + at] >> 2 * g & 3u);
}

uint32_t load_word(const uint8_t* from) {
  uint32_t word;
  std::memcpy(&word, from, 4);
  return word;
}

void store_word(uint8_t* to, uint32_t word) { std::memcpy(to, &word, 4); }

void quantise_block(const Weight& w, uint8_t* data, int64_t row, int64_t block, const float* x) {
  const Place at = place(w, data, row, block);
  float far = x[0];
  for (int i = 0; i < kBlock; ++i)
    if (std::fabs(x[i]) > std::fabs(far)) far = x[i];
  if (w.format == Format::Q8) {
    *at.scale = float_to_half(std::fabs(far) / 127.0f);
    const float scale = half_to_float(*at.scale);  // quants that fit the scale as stored
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (int i = 0; i < kBlock; ++i) {
      const float q = std::min(127.0f, std::max(-127.0f, x[i] * inverse));
      store_byte(at.quants, at.channel, i, static_cast<int>(q + (q < 0.0f ? -0.5f : 0.5f)));
    }
    return;
  }
  const bool with_minimum = w.format == Format::Q4_1;
  const Fit fit = with_minimum ? fit_block(x) : Fit{far / -8.0f, 0.0f};
  *at.scale = float_to_half(fit.scale);
  if (with_minimum) *at.minimum = float_to_half(fit.minimum);
  const float scale = half_to_float(*at.scale);
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  const float offset = with_minimum ? -half_to_float(*at.minimum) * inverse : 8.0f;
  for (int i = 0; i < kBlock; ++i) {
    const float q = std::min(15.0f, std::max(0.0f, x[i] * inverse + offset + 0.5f));
    store_nibble(at.quants, at.channel, i, static_cast<uint32_t>(q));
  }
}

}  // namespace

void pack_gguf_rows(const Weight& w, uint8_t* data, const uint8_t* src, int64_t row0, int64_t rows) {
  for (int64_t row = row0; row < row0 + rows; ++row) {
    for (int64_t block = 0; block < w.blocks; ++block) {
      const Place at = place(w, data, row, block);
      std::memcpy(at.scale, src, 2);
      src += 2;
      if (w.format == Format::Q4_1) {
        std::memcpy(at.minimum, src, 2);
        src += 2;
      }
      uint8_t* to = at.quants + at.channel * 4;
      if (w.format == Format::Q8) {
        for (int g = 0; g < 8; ++g) store_word(to + g * 64, load_word(src + g * 4) ^ 0x80808080u);
        src += kBlock;
      } else {  // GGUF: byte i holds element i in its low and element i + 16 in its high nibble
        uint32_t group[8];
        for (int g = 0; g < 4; ++g) {
          group[g] = load_word(src + g * 4) & 0x0f0f0f0fu;
          group[g + 4] = (load_word(src + g * 4) >> 4) & 0x0f0f0f0fu;
        }
        for (int g = 0; g < 8; g += 2) store_word(to + g / 2 * 64, group[g] | group[g + 1] << 4);
        src += kBlock / 2;
      }
    }
  }
}

void pack_float_rows(const Weight& w, uint8_t* data, const float* src, int64_t row0, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t block = 0; block < w.blocks; ++block)
      quantise_block(w, data, row0 + row, block, src + row * w.k + block * kBlock);
}

// With e the weights that the first plane lacks, scale * (lower two bits - what it has in their place), Cauchy and Schwarz say
// that the products differ by |e| |x| at most. Beside this there is rounding, in either product and in adding the bound: less than
// (blocks + 8) units of 2^-24 of the sum of |products of a block|, which is at most |w| |x|, again by Cauchy and Schwarz.
// Twice as much is added, which also covers the terms of higher order and the rounding here.
float split_tile(const Weight& from, const Weight& to, uint8_t* data, int64_t tile, int64_t channels) {
  uint8_t* const upper = data + tile * to.tile_bytes;
  uint8_t* const low = data + (to.low(tile) - to.data);
  double lacking[kTile] = {}, whole[kTile] = {};  // squares of |e| and |w|
  for (int64_t b = 0; b < to.blocks; ++b) {
    for (int at = 0; at < 128; ++at) {
      const int half = at / 64, i = at % 64, channel = i / 4;
      const uint8_t* q = from.data + b * 512 + half * 256 + i;
      const uint32_t last = q[192];
      uint8_t* six = upper + b * 384 + half * 192 + i;
      uint32_t lows = 0;
      int missing = 0, values = 0;
      for (int g = 0; g < 4; ++g) {
        const uint32_t stored = q[g * 64], instead = g == 0 ? last >> 6 : kPlaneFill;
        if (g < 3) six[g * 64] = static_cast<uint8_t>((stored & 0xfcu) | (last >> (6 - 2 * g) & 3u));
        lows |= (stored & 3u) << 2 * g;
        const int difference = static_cast<int>(stored & 3u) - static_cast<int>(instead);
        const int value = static_cast<int>(stored) - 128;
        missing += difference * difference;
        values += value * value;
      }
      low[b * kLowBytes + at] = static_cast<uint8_t>(lows);
      const double scale = half_to_float(from.scales(0)[b * kTile + channel]);
      lacking[channel] += scale * scale * missing;
      whole[channel] += scale * scale * values;
    }
  }
  std::memcpy(upper + to.blocks * 384, from.scales(0), static_cast<size_t>(to.blocks) * kTile * 2);
  float bounds[kTile], largest = 0.0f;
  for (int channel = 0; channel < kTile; ++channel) {
    const double e = std::sqrt(lacking[channel]), sums = 2.0 * std::sqrt(whole[channel]) + e;
    const double rounding = 2.0 * static_cast<double>(to.blocks + 8) / 16777216.0;
    bounds[channel] = channel < channels ? static_cast<float>((e + rounding * sums) * 1.000001) : HUGE_VALF;
    const float norm = static_cast<float>(2.0 * sums);
    if (channel < channels) largest = norm <= largest ? largest : norm < HUGE_VALF ? norm : HUGE_VALF;
  }
  std::memcpy(upper + (reinterpret_cast<const uint8_t*>(to.bounds(tile)) - to.quants(tile)), bounds, sizeof(bounds));
  return largest;
}

// A little is added for products so small that they are rounded in absolute steps.
float row_norm(const Activations& a, int64_t blocks, int64_t row) {
  double total = 0.0;
  for (int64_t b = 0; b < blocks; ++b) {
    int32_t squares = 0;
    const int8_t* q = a.block(b, row);
    for (int i = 0; i < kBlock; ++i) squares += q[i] * q[i];
    const double scale = a.block_info(b, row)->scale;
    total += scale * scale * squares;
  }
  return static_cast<float>(std::sqrt(total) * 1.000001 + 1e-20);
}

void unpack_row(const Weight& w, int64_t row, float* out) {
  for (int64_t block = 0; block < w.blocks; ++block) {
    const Place at = place(w, const_cast<uint8_t*>(w.data), row, block);
    const float scale = half_to_float(*at.scale);
    const float minimum = w.format == Format::Q4_1 ? half_to_float(*at.minimum) : 0.0f;
    for (int i = 0; i < kBlock; ++i) {
      float q;
      if (w.format == Format::Split)
        q = static_cast<float>(load_split(at.quants, w.low(row / kTile) + block * kLowBytes, at.channel, i)) - 128.0f;
      else if (w.format == Format::Q8)
        q = static_cast<float>(at.quants[(i / 4) * 64 + at.channel * 4 + i % 4]) - 128.0f;
      else
        q = static_cast<float>(load_nibble(at.quants, at.channel, i)) - (w.format == Format::Q4_0 ? 8.0f : 0.0f);
      out[block * kBlock + i] = scale * q + minimum;
    }
  }
}

}  // namespace te
