// Kernels for CPUs, in fp32: causal attention within documents, and cross-entropy. `llmtrain.models.cpu` calls them.
//
// Attention: blocks of queries are multiplied by blocks of keys, and probabilities are not kept: the backward pass
// computes them again from the logarithm of their sums (FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2).
// Scores are stored by keys, [keys, queries]. A vector therefore holds queries: softmax adds no numbers within a
// vector, and the size of a head need not be a multiple of a vector's.
//
// Queries, keys, values, output and gradients are contiguous, [tokens, heads, width]. Queries and output have
// `heads`, keys and values have `key_heads`. Values and output are `value_width` wide.
//
// Cross-entropy: torch writes the log-softmax of all logits, and in the backward pass an array of zeros and the
// gradient. Here, the gradient overwrites the logits. It is computed from them and the logarithms of their sums.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <vector>

// As in `llmtrain.models.cpu`.
struct Sizes {
  int64_t tokens, documents, heads, key_heads, width, value_width, window;
  float scale;
  int32_t threads;
};

namespace {

// kColumns vectors of kRows rows are summed in registers: 24 of 32, or 12 of 16.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kColumns = 4;
#elif defined(__AVX__)
constexpr int kLanes = 8, kColumns = 2;
#else
constexpr int kLanes = 4, kColumns = 4;
#endif
constexpr int kRows = 6;
// Queries and keys of a block. Where a block of keys crosses the diagonal, it is cut into steps, because the queries
// before a step do not attend to it.
constexpr int64_t kBlock = 64, kStep = 32;
constexpr float kMasked = -1e30f;

using Vector = float __attribute__((vector_size(4 * kLanes)));
using Unaligned = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
using Integers = int32_t __attribute__((vector_size(4 * kLanes)));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Vector values) { *reinterpret_cast<Unaligned*>(to) = values; }
inline Vector choose(Integers condition, Vector yes, Vector no) {
  return reinterpret_cast<Vector>((condition & reinterpret_cast<Integers>(yes)) |
                                  (~condition & reinterpret_cast<Integers>(no)));
}

// Returns e^x for x <= 0, and 0 where the result would be a denormal number. NaN remains NaN.
// x = n * log(2) + r with |r| <= log(2) / 2, and log(2) in two parts, so that r is exact; the polynomial of e^r is
// that of Cephes (expf.c).
inline Vector exponential(Vector x) {
  const Integers is_zero = x < -87.0f;
  x = choose(is_zero, Vector{}, x);
  const Integers power = __builtin_convertvector(x * 1.44269504f - 0.5f, Integers);
  const Vector n = __builtin_convertvector(power, Vector);
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector sum = Vector{} + 1.9875691500e-4f;
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f})
    sum = sum * r + factor;
  sum = sum * (r * r) + r + 1.0f;
  const Integers result = reinterpret_cast<Integers>(sum) + (power << 23);
  return choose(is_zero, Vector{}, reinterpret_cast<Vector>(result));
}

// A matrix: the element of row i and column k is data[i * row + k * column].
struct Matrix {
  const float* data;
  int64_t row, column;
};

template <int rows, int columns>
inline void tile(Matrix a, int64_t depth, const float* b, int64_t b_row, float* c, int64_t c_row, bool adds) {
  Vector sums[rows][columns] = {};
  for (int64_t k = 0; k < depth; ++k)
    for (int j = 0; j < columns; ++j) {
      const Vector right = load(b + k * b_row + j * kLanes);
      for (int i = 0; i < rows; ++i) sums[i][j] += a.data[i * a.row + k * a.column] * right;
    }
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j) {
      float* at = c + i * c_row + j * kLanes;
      store(at, adds ? load(at) + sums[i][j] : sums[i][j]);
    }
}

template <int columns>
void strip(int64_t rows, Matrix a, int64_t depth, const float* b, int64_t b_row, float* c, int64_t c_row, bool adds) {
  const auto take = [&]<int step>() {
    for (; rows >= step; rows -= step, a.data += step * a.row, c += step * c_row)
      tile<step, columns>(a, depth, b, b_row, c, c_row, adds);
  };
  take.template operator()<kRows>();
  take.template operator()<4>();
  take.template operator()<2>();
  take.template operator()<1>();
}

// c [rows, width] = a [rows, depth] @ b [depth, width], or is increased by it; `width` is a multiple of a vector's.
void product(int64_t rows, int64_t width, int64_t depth, Matrix a, const float* b, int64_t b_row, float* c,
             int64_t c_row, bool adds) {
  const auto take = [&]<int columns>() {
    for (; width >= columns * kLanes; width -= columns * kLanes, b += columns * kLanes, c += columns * kLanes)
      strip<columns>(rows, a, depth, b, b_row, c, c_row, adds);
  };
  take.template operator()<kColumns>();
  take.template operator()<2>();
  take.template operator()<1>();
}

inline int64_t padded(int64_t width) { return (width + kLanes - 1) / kLanes * kLanes; }

// Memory that begins where a vector may begin.
struct Buffer {
  explicit Buffer(int64_t size) : data(new (std::align_val_t(64)) float[size]) {}
  ~Buffer() { operator delete[](data, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  float* const data;
};

// Queries `first` to `first + rows` of the document from `start` to `end`.
struct Queries {
  int64_t start, first, rows;
  int64_t columns() const { return padded(rows); }
};

// Calls do_keys(from, keys, skipped) for each block of keys that a block of queries attends to; none of the first
// `skipped` queries, a multiple of a vector's, attends to any of them.
template <typename Function>
void for_keys(const Queries& block, int64_t window, Function do_keys) {
  const int64_t earliest = window ? std::max(block.start, block.first - window + 1) : block.start;
  const int64_t end = block.first + block.rows;
  for (int64_t from = block.start + (earliest - block.start) / kBlock * kBlock, keys; from < end; from += keys) {
    keys = std::min(from < block.first ? kBlock : kStep, end - from);
    do_keys(from, keys, std::max<int64_t>(0, from - block.first) / kLanes * kLanes);
  }
}

// Writes [width, kBlock]: rows become columns, and the last vector is filled up with zeros.
void transpose(const float* from, int64_t row, int64_t rows, int64_t width, float factor, float* to) {
  for (int64_t i = 0; i < padded(rows); ++i)
    for (int64_t k = 0; k < width; ++k) to[k * kBlock + i] = i < rows ? from[i * row + k] * factor : 0.0f;
}

// Writes [kBlock, padded(width)].
void copy(const float* from, int64_t row, int64_t rows, int64_t width, float* to) {
  for (int64_t i = 0; i < rows; ++i, to += padded(width)) {
    std::copy_n(from + i * row, width, to);
    std::fill(to + width, to + padded(width), 0.0f);
  }
}

float dot(const float* a, const float* b, int64_t width) {
  Vector parts{};
  int64_t k = 0;
  for (; k + kLanes <= width; k += kLanes) parts += load(a + k) * load(b + k);
  float sum = 0.0f;
  for (int n = 0; n < kLanes; ++n) sum += parts[n];
  for (; k < width; ++k) sum += a[k] * b[k];
  return sum;
}

// Writes the scores of a block, [keys, kBlock], from the scaled queries, [width, kBlock].
void score(const Queries& block, int64_t window, int64_t from, int64_t keys, int64_t skipped, Matrix key,
           int64_t width, const float* queries, float* scores) {
  product(keys, block.columns() - skipped, width, key, queries + skipped, kBlock, scores + skipped, kBlock, false);
  const bool all_see = from + keys <= block.first + 1 && (!window || block.first + block.rows - from <= window);
  if (all_see) return;
  Integers lanes;
  for (int n = 0; n < kLanes; ++n) lanes[n] = n;
  const int32_t reach = window ? static_cast<int32_t>(window) : INT32_MAX;
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t i = skipped; i < block.columns(); i += kLanes) {
      const Integers behind = lanes + static_cast<int32_t>(block.first + i - from - j);
      float* at = scores + j * kBlock + i;
      store(at, choose((behind >= 0) & (behind < reach), load(at), Vector{} + kMasked));
    }
}

bool are_valid(const Sizes& sizes, const int32_t* bounds) {
  return sizes.documents > 0 && sizes.heads % sizes.key_heads == 0 && bounds[0] == 0 &&
         bounds[sizes.documents] == sizes.tokens && std::is_sorted(bounds, bounds + sizes.documents + 1);
}

}  // namespace

// Writes the output, and the logarithm of each query's sum of exponentials, [heads, tokens]. Returns whether `bounds`
// [documents + 1] are valid.
extern "C" bool attention_forward(const Sizes* given, const int32_t* bounds, const float* query, const float* key,
                                  const float* value, float* output, float* log_sums) {
  const Sizes sizes = *given;
  if (!are_valid(sizes, bounds)) return false;
  const int64_t width = sizes.width, value_width = sizes.value_width, group = sizes.heads / sizes.key_heads;
  const int64_t row = sizes.heads * width, key_row = sizes.key_heads * width;
  const int64_t out_row = sizes.heads * value_width, value_row = sizes.key_heads * value_width;
  std::vector<Queries> blocks;
  for (int64_t n = 0; n < sizes.documents; ++n)
    for (int64_t first = bounds[n]; first < bounds[n + 1]; first += kBlock)
      blocks.push_back({bounds[n], first, std::min(kBlock, bounds[n + 1] - first)});
  const int64_t tasks = static_cast<int64_t>(blocks.size()) * sizes.heads;
#pragma omp parallel num_threads(sizes.threads)
  {
    const Buffer queries(kBlock * width), sums(kBlock * value_width), scores(kBlock * kBlock);
    const Buffer largest(kBlock), totals(kBlock);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
      const Queries& block = blocks[task / sizes.heads];
      const int64_t head = task % sizes.heads, columns = block.columns();
      transpose(query + block.first * row + head * width, row, block.rows, width, sizes.scale, queries.data);
      std::fill(sums.data, sums.data + kBlock * value_width, 0.0f);
      std::fill(largest.data, largest.data + kBlock, kMasked);
      std::fill(totals.data, totals.data + kBlock, 0.0f);
      for_keys(block, sizes.window, [&](int64_t from, int64_t keys, int64_t skipped) {
        const Matrix by_key{key + from * key_row + head / group * width, key_row, 1};
        score(block, sizes.window, from, keys, skipped, by_key, width, queries.data, scores.data);
        for (int64_t i = skipped; i < columns; i += kLanes) {
          const Vector before = load(largest.data + i);
          Vector most = before;
          for (int64_t j = 0; j < keys; ++j) {
            const Vector one = load(scores.data + j * kBlock + i);
            most = choose(one > most, one, most);
          }
          const Vector factor = exponential(before - most);
          Vector total = Vector{};
          for (int64_t j = 0; j < keys; ++j) {
            float* at = scores.data + j * kBlock + i;
            const Vector weight = exponential(load(at) - most);
            store(at, weight);
            total += weight;
          }
          store(totals.data + i, load(totals.data + i) * factor + total);
          store(largest.data + i, most);
          for (int64_t k = 0; k < value_width; ++k) {
            float* at = sums.data + k * kBlock + i;
            store(at, load(at) * factor);
          }
        }
        const Matrix by_column{value + from * value_row + head / group * value_width, 1, value_row};
        product(value_width, columns - skipped, keys, by_column, scores.data + skipped, kBlock, sums.data + skipped,
                kBlock, true);
      });
      for (int64_t i = 0; i < block.rows; ++i) {
        const float total = totals.data[i];
        float* to = output + (block.first + i) * out_row + head * value_width;
        for (int64_t k = 0; k < value_width; ++k) to[k] = sums.data[k * kBlock + i] / total;
        log_sums[head * sizes.tokens + block.first + i] = largest.data[i] + std::log(total);
      }
    }
  }
  return true;
}

// Writes the gradients of queries, keys and values, given that of the output. A thread computes the heads that share
// a key, so no two threads add to the same numbers.
extern "C" bool attention_backward(const Sizes* given, const int32_t* bounds, const float* query, const float* key,
                                   const float* value, const float* output, const float* log_sums,
                                   const float* of_output, float* of_query, float* of_key, float* of_value) {
  const Sizes sizes = *given;
  if (!are_valid(sizes, bounds)) return false;
  const int64_t width = sizes.width, value_width = sizes.value_width, group = sizes.heads / sizes.key_heads;
  const int64_t row = sizes.heads * width, key_row = sizes.key_heads * width;
  const int64_t out_row = sizes.heads * value_width, value_row = sizes.key_heads * value_width;
  const int64_t key_columns = padded(width), value_columns = padded(value_width);
  int64_t longest = 0;
  for (int64_t n = 0; n < sizes.documents; ++n) longest = std::max<int64_t>(longest, bounds[n + 1] - bounds[n]);
#pragma omp parallel num_threads(sizes.threads)
  {
    // By columns, [width, kBlock], and by rows, [kBlock, padded width]; `d` is a gradient.
    const Buffer queries(kBlock * width), d_outputs(kBlock * value_width), d_queries(kBlock * width);
    const Buffer query_rows(kBlock * key_columns), d_output_rows(kBlock * value_columns);
    const Buffer weights(kBlock * kBlock), d_scores(kBlock * kBlock), norms(kBlock), means(kBlock);
    const Buffer d_keys(longest * key_columns), d_values(longest * value_columns);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < sizes.documents * sizes.key_heads; ++task) {
      const int64_t document = task / sizes.key_heads, key_head = task % sizes.key_heads;
      const int64_t start = bounds[document], end = bounds[document + 1];
      std::fill(d_keys.data, d_keys.data + (end - start) * key_columns, 0.0f);
      std::fill(d_values.data, d_values.data + (end - start) * value_columns, 0.0f);
      for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head)
        for (int64_t first = start; first < end; first += kBlock) {
          const Queries block{start, first, std::min(kBlock, end - first)};
          const int64_t columns = block.columns();
          const float* query_at = query + first * row + head * width;
          const float* output_at = output + first * out_row + head * value_width;
          const float* of_output_at = of_output + first * out_row + head * value_width;
          transpose(query_at, row, block.rows, width, sizes.scale, queries.data);
          copy(query_at, row, block.rows, width, query_rows.data);
          transpose(of_output_at, out_row, block.rows, value_width, 1.0f, d_outputs.data);
          copy(of_output_at, out_row, block.rows, value_width, d_output_rows.data);
          std::fill(norms.data, norms.data + kBlock, 0.0f);
          std::fill(means.data, means.data + kBlock, 0.0f);
          for (int64_t i = 0; i < block.rows; ++i) {
            // The mean of the gradients of the row's probabilities, weighted by them.
            means.data[i] = dot(of_output_at + i * out_row, output_at + i * out_row, value_width);
            norms.data[i] = log_sums[head * sizes.tokens + first + i];
          }
          std::fill(d_queries.data, d_queries.data + kBlock * width, 0.0f);
          for_keys(block, sizes.window, [&](int64_t from, int64_t keys, int64_t skipped) {
            const float* key_at = key + from * key_row + key_head * width;
            const float* value_at = value + from * value_row + key_head * value_width;
            score(block, sizes.window, from, keys, skipped, {key_at, key_row, 1}, width, queries.data, weights.data);
            product(keys, columns - skipped, value_width, {value_at, value_row, 1}, d_outputs.data + skipped, kBlock,
                    d_scores.data + skipped, kBlock, false);
            for (int64_t j = 0; j < keys; ++j)
              for (int64_t i = skipped; i < columns; i += kLanes) {
                float *weight_at = weights.data + j * kBlock + i, *d_score_at = d_scores.data + j * kBlock + i;
                const Vector weight = exponential(load(weight_at) - load(norms.data + i));
                store(weight_at, weight);
                store(d_score_at, weight * (load(d_score_at) - load(means.data + i)));
              }
            product(width, columns - skipped, keys, {key_at, 1, key_row}, d_scores.data + skipped, kBlock,
                    d_queries.data + skipped, kBlock, true);
            product(keys, key_columns, block.rows - skipped, {d_scores.data + skipped, kBlock, 1},
                    query_rows.data + skipped * key_columns, key_columns, d_keys.data + (from - start) * key_columns,
                    key_columns, true);
            product(keys, value_columns, block.rows - skipped, {weights.data + skipped, kBlock, 1},
                    d_output_rows.data + skipped * value_columns, value_columns,
                    d_values.data + (from - start) * value_columns, value_columns, true);
          });
          float* to = of_query + first * row + head * width;
          for (int64_t i = 0; i < block.rows; ++i)
            for (int64_t k = 0; k < width; ++k) to[i * row + k] = d_queries.data[k * kBlock + i] * sizes.scale;
        }
      for (int64_t i = 0; i < end - start; ++i) {
        for (int64_t k = 0; k < width; ++k)
          of_key[(start + i) * key_row + key_head * width + k] = d_keys.data[i * key_columns + k] * sizes.scale;
        std::copy_n(d_values.data + i * value_columns, value_width,
                    of_value + (start + i) * value_row + key_head * value_width);
      }
    }
  }
  return true;
}

// As in `llmtrain.models.cpu`. A token with the label `no_target` has no loss.
struct Labels {
  int64_t tokens, vocabulary, no_target;
  int32_t threads;
};

namespace {

// Calls do_vector(k, values) for the vectors of a row that begin at k. The last one is filled up with -infinity.
template <typename Function>
inline void for_vectors(const float* row, int64_t width, Function do_vector) {
  int64_t k = 0;
  for (; k + kLanes <= width; k += kLanes) do_vector(k, load(row + k));
  if (k == width) return;
  Vector last = Vector{} - INFINITY;
  for (int n = 0; k + n < width; ++n) last[n] = row[k + n];
  do_vector(k, last);
}

}  // namespace

// Writes the loss of each token, and the logarithm of the sum of its exponentials. `logits` is [tokens, vocabulary].
// Returns whether each label is a token of the vocabulary, or `no_target`.
extern "C" bool cross_entropy_forward(const Labels* given, const int64_t* labels, const float* logits, float* losses,
                                      float* log_sums) {
  const Labels sizes = *given;
  for (int64_t i = 0; i < sizes.tokens; ++i)
    if ((labels[i] < 0 || labels[i] >= sizes.vocabulary) && labels[i] != sizes.no_target) return false;
#pragma omp parallel for num_threads(sizes.threads)
  for (int64_t i = 0; i < sizes.tokens; ++i) {
    const float* row = logits + i * sizes.vocabulary;
    Vector most = Vector{} - INFINITY, total{};
    for_vectors(row, sizes.vocabulary, [&](int64_t, Vector one) { most = choose(one > most, one, most); });
    float largest = most[0];
    for (int n = 1; n < kLanes; ++n) largest = std::max(largest, most[n]);
    for_vectors(row, sizes.vocabulary, [&](int64_t, Vector one) { total += exponential(one - largest); });
    float sum = 0.0f;
    for (int n = 0; n < kLanes; ++n) sum += total[n];
    log_sums[i] = largest + std::log(sum);
    losses[i] = labels[i] == sizes.no_target ? 0.0f : log_sums[i] - row[labels[i]];
  }
  return true;
}

// Overwrites logits with their gradient, given that of each token's loss.
extern "C" bool cross_entropy_backward(const Labels* given, const int64_t* labels, float* logits,
                                       const float* of_losses, const float* log_sums) {
  const Labels sizes = *given;
#pragma omp parallel for num_threads(sizes.threads)
  for (int64_t i = 0; i < sizes.tokens; ++i) {
    float* row = logits + i * sizes.vocabulary;
    if (labels[i] == sizes.no_target) {
      std::fill(row, row + sizes.vocabulary, 0.0f);
      continue;
    }
    for_vectors(row, sizes.vocabulary, [&](int64_t k, Vector one) {
      const Vector gradient = exponential(one - log_sums[i]) * of_losses[i];
      if (k + kLanes <= sizes.vocabulary)
        store(row + k, gradient);
      else
        for (int n = 0; k + n < sizes.vocabulary; ++n) row[k + n] = gradient[n];
    });
    row[labels[i]] -= of_losses[i];
  }
  return true;
}
