#include "modicum/kernels/adamw_reference_double.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

namespace modicum {
namespace {

template <typename T>
T at(const void* array, int64_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(array) + i * static_cast<int64_t>(sizeof value),
              sizeof value);
  return value;
}
template <typename T>
void put(void* array, int64_t i, T value) {
  std::memcpy(static_cast<char*>(array) + i * static_cast<int64_t>(sizeof value), &value,
              sizeof value);
}

float as_f32(DType dtype, const std::byte* array, int64_t i) {
  float value = 0;
  cast(array + i * bits_per_element(dtype) / 8, dtype, reinterpret_cast<std::byte*>(&value),
       DType::f32, 1);
  return value;
}

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

struct BlockOf {
  int64_t block, in_block;
};

BlockOf block_of(int64_t index, int64_t row) {
  if (row == 0) return {index / 128, index % 128};
  const int64_t blocks_of_row = (row + 127) / 128;
  const int64_t column = index % row;
  return {index / row * blocks_of_row + column / 128, column % 128};
}

uint32_t word(uint64_t key, uint32_t in_block) {
  uint32_t x = static_cast<uint32_t>(key) + in_block * 0x9e3779b9U;
  x ^= x >> 15;
  x *= static_cast<uint32_t>(key >> 32) | 1U;
  return x ^ (x >> 16);
}

// ---- the master parameter

float read_master(const AdamSpan& s, int64_t i) {
  if (s.master_low == nullptr) return at<float>(s.master, i);
  const uint32_t high = static_cast<uint32_t>(at<uint16_t>(s.master, i)) << 16;
  const bool is_short = s.format == StateFormat::int8_moments_24;
  const int32_t low = is_short ? at<int8_t>(s.master_low, i) * 256 : at<int16_t>(s.master_low, i);
  // With these upper halves, the lower half belongs to a value that the caller has overwritten.
  const bool is_zero = (high & 0x7fffffffU) == 0;
  const bool is_infinite_or_nan = (high & 0x7f800000U) == 0x7f800000U;
  if (is_infinite_or_nan || (is_zero && low < 0)) return std::bit_cast<float>(high);
  return std::bit_cast<float>(high + static_cast<uint32_t>(low));
}

void write_master(const AdamSpan& s, int64_t i, float value, uint32_t random) {
  if (s.master_low == nullptr) return put(s.master, i, value);
  auto bits = std::bit_cast<uint32_t>(value);
  const bool is_short = s.format == StateFormat::int8_moments_24;
  if (is_short) bits = (bits + random % 256) / 256 * 256;
  const uint32_t high = (bits + 0x8000U) / 0x10000U;
  const auto low = static_cast<int32_t>(bits - high * 0x10000U);
  put(s.master, i, static_cast<uint16_t>(high));
  if (is_short) {
    put(s.master_low, i, static_cast<int8_t>(low / 256));
  } else {
    put(s.master_low, i, static_cast<int16_t>(low));
  }
}

// ---- moments in codes; `scale` is the block's

float codable(float value) {
  if (std::isnan(value)) return 0;
  return std::clamp(value, -0x1p63F, 0x1p63F);
}

// The codes' offsets: 2, 2.125, ... 496 and 2, 2.0625, ... 504.
float offset_of(uint32_t code, uint32_t codes_of_segment) {
  const auto steps = static_cast<float>(code % codes_of_segment + codes_of_segment);
  return std::ldexp(steps / static_cast<float>(codes_of_segment),
                    static_cast<int>(code / codes_of_segment) + 1);
}
float signed_of(uint8_t q, float scale) {
  const float magnitude = (offset_of(q % 128U, 16) - 2) * (1.0F / 494) * scale;
  return q >= 128 ? -magnitude : magnitude;
}
float root_of(uint8_t q, float scale) { return (offset_of(q, 32) - 2) * (1.0F / 502) * scale; }

float per_value(float scale, float range) {
  return range / std::max(scale, 0x1p-100F) * (1 + 0x1p-22F);
}
// The code below z, or the next one; z's place between the two is the probability of the next one.
// `random` has `bits` bits.
uint32_t rounded_code(float z, uint32_t codes_of_segment, uint32_t random, int bits) {
  const int segment = std::ilogb(z) - 1;
  const double steps = std::ldexp(static_cast<double>(z), -segment - 1) *
                       static_cast<double>(codes_of_segment);  // exact
  const double up = std::ldexp(static_cast<double>(random), -bits);
  const auto below = static_cast<uint32_t>(std::floor(steps + up)) - codes_of_segment;
  return static_cast<uint32_t>(segment) * codes_of_segment + below;
}
uint8_t signed_code(float value, float scale, uint32_t word) {
  const float z = std::fma(std::fabs(value), per_value(scale, 494), 2.0F);
  const uint32_t code = rounded_code(std::min(z, 496.0F), 16, word >> 13, 19);
  return static_cast<uint8_t>(code + (std::signbit(value) ? 128 : 0));
}
uint8_t root_code(float root, float scale, float least, uint32_t word) {
  if (!(root > 0)) return 0;
  const float z = std::max(std::fma(root, per_value(scale, 502), 2.0F), least);
  return static_cast<uint8_t>(rounded_code(std::min(z, 504.0F), 32, word % 0x40000U, 18));
}
// The least offset of a root: 3/4 of the step between exp_avg's codes at this code, converted to a
// root's offsets, plus 2.0625, the offset of root code 1.
float least_root(uint8_t exp_avg_code, float exp_avg_scale, float root_scale) {
  const float per_step = 0.75F / 16 * 502 / 494 * exp_avg_scale / std::max(root_scale, 0x1p-100F);
  return std::fma(std::ldexp(2.0F, exp_avg_code % 128 / 16), per_step, 2.0625F);
}

float read_square(const AdamSpan& s, const std::byte* plane, const float* scales, int64_t block,
                  int64_t i) {
  const DType moment = row_of(s.format).moment;
  if (moment == DType::f32) return at<float>(plane, i);
  if (moment == DType::bf16) return as_f32(DType::bf16, plane, i);
  const float root = root_of(at<uint8_t>(plane, i), scales[block]);
  return root * root;
}

struct Element {
  float p, m, v, most;
};

Element torch_step(const AdamNumbers& n, Element e, float g, bool in_codes) {
  if (!n.decoupled && n.decay != 0) g = std::fma(n.decay, e.p, g);
  if (n.decoupled) e.p = e.p * n.decay;
  if (std::fabs(n.one_minus_beta1) < 0.5F) {
    e.m = std::fma(n.one_minus_beta1, g - e.m, e.m);
  } else {
    e.m = std::fma(n.one_minus_beta1 - 1, g - e.m, g);
  }
  e.v = std::fma(n.one_minus_beta2 * g, g, e.v * n.beta2);
  e.most = n.amsgrad ? std::max(e.most, e.v) : e.v;
  const float root = std::sqrt(e.most);
  const float denominator = in_codes ? std::fma(root, 1 / n.bias2, n.eps) : root / n.bias2 + n.eps;
  e.p = e.p + n.step_size * e.m / denominator;
  return e;
}

Element deepspeed_step(const AdamNumbers& n, Element e, float g) {
  if (!n.decoupled && n.decay != 0) g = std::fma(e.p, n.decay, g);
  e.m = std::fma(g, n.one_minus_beta1, e.m * n.beta1);
  e.v = std::fma(g * g, n.one_minus_beta2, e.v * n.beta2);
  e.most = e.v;
  const float update = e.m / std::fma(std::sqrt(e.v), n.bias2, n.eps);
  if (n.decoupled && n.decay != 0) e.p = std::fma(e.p, n.decay, e.p);
  e.p = std::fma(update, n.step_size, e.p);
  return e;
}

uint16_t bf16_at_random(float value, uint32_t random16) {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + random16) >> 16);
}

void write_element(const AdamNumbers& n, const AdamSpan& s, int64_t i, const Element& e) {
  const uint32_t random = reference_word(n.seed, n.step, s.parameter, s.first + i, s.row);
  write_master(s, i, e.p, random);
  if (s.out != nullptr) {
    cast(reinterpret_cast<const std::byte*>(&e.p), DType::f32, s.out + 2 * i, s.out_dtype, 1);
  }
  const DType moment = row_of(s.format).moment;
  if (moment == DType::f32) {
    put(s.exp_avg, i, e.m);
    put(s.exp_avg_sq, i, e.v);
    if (n.amsgrad) put(s.max_exp_avg_sq, i, e.most);
  } else if (moment == DType::bf16) {
    put(s.exp_avg, i, bf16_at_random(e.m, random & 0xffffU));
    put(s.exp_avg_sq, i, bf16_at_random(e.v, random >> 16));
    if (n.amsgrad) put(s.max_exp_avg_sq, i, bf16_at_random(e.most, random >> 16));
  }
}

// Encodes all elements of one block that are in the span, from `begin` on.
void encode_block(const AdamNumbers& n, const AdamSpan& s, int64_t block, int64_t begin,
                  const std::vector<Element>& elements) {
  float scale = 0;
  float root_scale = 0;
  float max_scale = 0;
  for (const Element& e : elements) {
    scale = std::max(scale, std::fabs(codable(e.m)));
    root_scale = std::max(root_scale, codable(std::sqrt(e.v)));
    max_scale = std::max(max_scale, codable(std::sqrt(e.most)));
  }
  s.exp_avg_scale[block] = scale;
  s.exp_avg_sq_scale[block] = root_scale;
  if (n.amsgrad) s.max_exp_avg_sq_scale[block] = max_scale;
  for (size_t k = 0; k < elements.size(); ++k) {
    const Element& e = elements[k];
    const int64_t i = begin + static_cast<int64_t>(k);
    const uint32_t random = reference_word(n.seed, n.step, s.parameter, s.first + i, s.row);
    const uint8_t code = signed_code(codable(e.m), scale, random);
    put(s.exp_avg, i, code);
    const auto put_root = [&](std::byte* plane, float square, float of_scale) {
      const float least = least_root(code, scale, of_scale);
      put(plane, i, root_code(codable(std::sqrt(square)), of_scale, least, random));
    };
    put_root(s.exp_avg_sq, e.v, root_scale);
    if (n.amsgrad) put_root(s.max_exp_avg_sq, e.most, max_scale);
  }
}

}  // namespace

uint32_t reference_word(uint64_t seed, int64_t step, uint64_t parameter, int64_t index,
                        int64_t row) {
  constexpr uint64_t kGamma = 0x9e3779b97f4a7c15U;
  const uint64_t stream = mix(mix(mix(seed + kGamma) + static_cast<uint64_t>(step)) + parameter);
  const BlockOf at = block_of(index, row);
  const auto block = static_cast<uint64_t>(at.block);
  return word(mix(stream + (block + 1) * kGamma), static_cast<uint32_t>(at.in_block));
}

void reference_adamw(const AdamNumbers& n, const AdamSpan& s) {
  const DType moment = row_of(s.format).moment;
  std::vector<Element> block;
  for (int64_t i = 0; i < s.n; ++i) {
    const int64_t block_index = block_of(s.first + i, s.row).block - block_of(s.first, s.row).block;
    float g = as_f32(s.grad_dtype, s.grad, i) * n.unscale * n.clip;
    if (n.maximize) g = -g;
    Element e{read_master(s, i), 0, 0, 0};
    if (moment == DType::f32) e.m = at<float>(s.exp_avg, i);
    if (moment == DType::bf16) e.m = as_f32(DType::bf16, s.exp_avg, i);
    if (moment == DType::i8)
      e.m = signed_of(at<uint8_t>(s.exp_avg, i), s.exp_avg_scale[block_index]);
    e.v = read_square(s, s.exp_avg_sq, s.exp_avg_sq_scale, block_index, i);
    if (n.amsgrad) {
      e.most = read_square(s, s.max_exp_avg_sq, s.max_exp_avg_sq_scale, block_index, i);
    }
    const bool torch = n.semantics == AdamSemantics::torch;
    e = torch ? torch_step(n, e, g, moment == DType::i8) : deepspeed_step(n, e, g);
    write_element(n, s, i, e);
    if (moment != DType::i8) continue;
    block.push_back(e);
    if (i + 1 < s.n && block_of(s.first + i + 1, s.row).in_block != 0) continue;
    encode_block(n, s, block_index, i + 1 - static_cast<int64_t>(block.size()), block);
    block.clear();
  }
}

GradNorm reference_squares(const std::byte* grad, DType dtype, int64_t n) {
  std::vector<double> sums(32);
  bool finite = true;
  const int64_t of_stream = n / 32 * 8;  // elements in each of the four streams; a rest follows
  for (int64_t i = 0; i < n; ++i) {
    const double x = as_f32(dtype, grad, i);
    finite = finite && std::isfinite(x);
    const int64_t sum = i < 4 * of_stream ? i / of_stream * 8 + i % 8 : i % 32;
    sums[static_cast<size_t>(sum)] += x * x;
  }
  double sum = 0;
  for (const double part : sums) sum += part;
  return {finite ? sum : 0, finite};
}

}  // namespace modicum
