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
  w.tile_bytes = round_up(w.blocks * (quant_bytes(format) + scale_bytes), kAlign);
  return w;
}

int64_t weight_bytes(const Weight& w) { return w.tiles * w.tile_bytes; }

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

void unpack_row(const Weight& w, int64_t row, float* out) {
  for (int64_t block = 0; block < w.blocks; ++block) {
    const Place at = place(w, const_cast<uint8_t*>(w.data), row, block);
    const float scale = half_to_float(*at.scale);
    const float minimum = w.format == Format::Q4_1 ? half_to_float(*at.minimum) : 0.0f;
    for (int i = 0; i < kBlock; ++i) {
      float q;
      if (w.format == Format::Q8)
        q = static_cast<float>(at.quants[(i / 4) * 64 + at.channel * 4 + i % 4]) - 128.0f;
      else
        q = static_cast<float>(load_nibble(at.quants, at.channel, i)) - (w.format == Format::Q4_0 ? 8.0f : 0.0f);
      out[block * kBlock + i] = scale * q + minimum;
    }
  }
}

}  // namespace te
