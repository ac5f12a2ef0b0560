// Numbers in few bits on a CPU: quantize, dequantize, and dequantize, add up and divide, each in one pass over memory.
// What the bytes mean, and the bits that come out, zgraph/program/block_quantization.py says. Compiled as C++17 without
// contraction of products and sums, which would round differently.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

enum Format { INT8, INT4, FP8, BF16 };  // (BF16 has no scales, and is not quantized here)

constexpr int64_t SCALE = 4;  // bytes
constexpr int64_t PIECE = 256;  // elements that are worked on at once: they stay in the nearest cache
constexpr float LARGEST[] = {127.0f, 7.0f, 448.0f};
constexpr float NEAREST = 12582912.0f;  // 1.5 * 2^23: added and taken away, it leaves the nearest whole number, the even one of two
constexpr uint32_t INFINITE = 0x7F800000, NOT_A_NUMBER = 0x7FC00000;

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

float of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// The parts of a message: `count` elements in each, in blocks of `block`.
struct Shape {
  int64_t count, block, blocks;  // (blocks of a part)
  int format;

  Shape(int64_t count, int64_t block, int format)
      : count(count), block(block), blocks((count + block - 1) / block), format(format) {}

  // The byte of a part at which an element begins.
  int64_t at(int64_t element) const {
    if (format == BF16) return 2 * element;
    return SCALE * blocks + (format == INT4 ? (element + 1) / 2 : element);
  }

  // The bytes of a part.
  int64_t size() const { return at(count); }
};

// The largest absolute value, by its bits: of these NaN's are the largest. So no number hides it.
float largest_of(const float* x, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; i++) most = std::max(most, bits_of(x[i]) & 0x7FFFFFFF);
  return of_bits(most > INFINITE ? NOT_A_NUMBER : most);
}

uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352D;
  x ^= x >> 15;
  x *= 0x846CA68B;
  return x ^ (x >> 16);
}

// Rounds to whole numbers, to the nearest or, drawn, up with the probability of the remainder.
void whole_numbers(const float* x, float* whole, int64_t n, float scale, float largest, bool drawn, uint32_t key, uint32_t at) {
  if (scale == 0) {
    std::fill(whole, whole + n, 0.0f);
    return;
  }
  const uint32_t of_block = bits_of(scale);
  for (int64_t i = 0; i < n; i++) whole[i] = x[i] / scale;
  if (drawn) {
    for (int64_t i = 0; i < n; i++) {
      const uint32_t drawn_bits = mixed(mixed(at + static_cast<uint32_t>(i)) ^ key ^ of_block);
      const float share = static_cast<float>(static_cast<int32_t>(drawn_bits >> 8)) * 0x1p-24f;
      const float low = std::floor(whole[i]);
      whole[i] = low + (share < whole[i] - low ? 1.0f : 0.0f);
    }
  } else {
    for (int64_t i = 0; i < n; i++) whole[i] = (whole[i] + NEAREST) - NEAREST;
  }
  for (int64_t i = 0; i < n; i++) {
    const float number = whole[i] == whole[i] ? whole[i] : 0.0f;
    whole[i] = std::min(std::max(number, -largest), largest);
  }
}

// float8_e4m3fn, ties to even; NaN for what is not finite or too large.
uint8_t fp8_of(float x) {
  const uint32_t bits = bits_of(x), size = bits & 0x7FFFFFFF;
  const uint32_t small = bits_of(of_bits(size) + 16384.0f) - 0x46800000;
  const uint32_t large = (size - 0x3C000000 + 0x7FFFF + ((size >> 20) & 1)) >> 20;
  const uint32_t rounded = size < 0x3C800000 ? small : large;
  return static_cast<uint8_t>(((bits >> 24) & 128) | (size >= 0x43F00000 ? 127 : rounded));
}

std::array<float, 256> numbers_of_fp8() {
  std::array<float, 256> numbers{};
  for (int byte = 0; byte < 256; byte++) {
    const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
    float size = std::ldexp(static_cast<float>(exponent ? mantissa + 8 : mantissa), std::max(exponent, 1) - 10);
    if ((byte & 127) == 127) size = std::numeric_limits<float>::quiet_NaN();
    numbers[byte] = byte >= 128 ? -size : size;
  }
  return numbers;
}

void quantize(const float* x, uint8_t* sent, int64_t n, float scale, int format, bool drawn, uint32_t key, uint32_t at) {
  float whole[PIECE];
  if (format == FP8) {
    for (int64_t i = 0; i < n; i++) sent[i] = fp8_of(scale == 0 ? 0.0f : x[i] / scale);
    return;
  }
  whole_numbers(x, whole, n, scale, LARGEST[format], drawn, key, at);
  if (format == INT8) {
    for (int64_t i = 0; i < n; i++) sent[i] = static_cast<uint8_t>(static_cast<int32_t>(whole[i]));
    return;
  }
  if (n % 2) whole[n] = 0.0f;  // (PIECE is even)
  for (int64_t i = 0; i < (n + 1) / 2; i++) {
    const int32_t low = static_cast<int32_t>(whole[2 * i]), high = static_cast<int32_t>(whole[2 * i + 1]);
    sent[i] = static_cast<uint8_t>((low & 15) | ((high & 15) << 4));
  }
}

// The numbers that n elements of a block stand for; n is even, or the part ends with them.
void dequantize(const uint8_t* sent, float* x, int64_t n, float scale, int format, const std::array<float, 256>& of_fp8) {
  if (format == INT8) {
    for (int64_t i = 0; i < n; i++) x[i] = static_cast<float>(static_cast<int8_t>(sent[i])) * scale;
  } else if (format == FP8) {
    for (int64_t i = 0; i < n; i++) x[i] = of_fp8[sent[i]] * scale;
  } else if (format == BF16) {
    for (int64_t i = 0; i < n; i++) {
      uint16_t half;
      std::memcpy(&half, sent + 2 * i, 2);
      x[i] = of_bits(static_cast<uint32_t>(half) << 16);
    }
  } else {
    for (int64_t i = 0; i < n / 2; i++) {
      const int32_t low = sent[i] & 15, high = sent[i] >> 4;
      x[2 * i] = static_cast<float>((low ^ 8) - 8) * scale;
      x[2 * i + 1] = static_cast<float>((high ^ 8) - 8) * scale;
    }
    if (n % 2) x[n - 1] = static_cast<float>(((sent[n / 2] & 15) ^ 8) - 8) * scale;
  }
}

float scale_of(const uint8_t* part, int64_t block, int format) {
  float scale = 1.0f;
  if (format != BF16) std::memcpy(&scale, part + SCALE * block, 4);
  return scale;
}

}  // namespace

extern "C" {

void zgraph_quantize(const float* x, uint8_t* sent, int64_t parts, int64_t count, int64_t block, int format, int drawn, uint32_t key, int threads) {
  const Shape shape(count, block, format);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t one = 0; one < parts * shape.blocks; one++) {
    const int64_t part = one / shape.blocks, first = one % shape.blocks * block;
    const int64_t end = std::min(first + block, count);
    const float* from = x + part * count;
    uint8_t* into = sent + part * shape.size();
    const float scale = largest_of(from + first, end - first) / LARGEST[format];
    std::memcpy(into + SCALE * (one % shape.blocks), &scale, 4);
    for (int64_t at = first; at < end; at += PIECE)
      quantize(from + at, into + shape.at(at), std::min(PIECE, end - at), scale, format, drawn, key, static_cast<uint32_t>(part * count + at));
  }
}

void zgraph_dequantize(const uint8_t* sent, float* x, int64_t parts, int64_t count, int64_t block, int format, int threads) {
  static const std::array<float, 256> of_fp8 = numbers_of_fp8();
  const Shape shape(count, block, format);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t one = 0; one < parts * shape.blocks; one++) {
    const int64_t part = one / shape.blocks, first = one % shape.blocks * block;
    const uint8_t* from = sent + part * shape.size();
    dequantize(from + shape.at(first), x + part * count + first, std::min(block, count - first), scale_of(from, one % shape.blocks, format), format, of_fp8);
  }
}

void zgraph_mean(const uint8_t* sent, float* x, int64_t parts, int64_t count, int64_t block, int format, int threads) {
  static const std::array<float, 256> of_fp8 = numbers_of_fp8();
  const Shape shape(count, block, format);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t one = 0; one < shape.blocks; one++) {
    float of_part[PIECE];
    const int64_t end = std::min((one + 1) * block, count);
    for (int64_t at = one * block; at < end; at += PIECE) {
      const int64_t n = std::min(PIECE, end - at);
      float* total = x + at;
      for (int64_t part = 0; part < parts; part++) {
        const uint8_t* from = sent + part * shape.size();
        dequantize(from + shape.at(at), part ? of_part : total, n, scale_of(from, one, format), format, of_fp8);
        if (part)
          for (int64_t i = 0; i < n; i++) total[i] += of_part[i];
      }
      for (int64_t i = 0; i < n; i++) total[i] /= static_cast<float>(parts);
    }
  }
}

}  // extern "C"
