/* The C interface. Every function returns 0, or -1 with a sentence in te_error(); none of them throws or crashes on bad
 * arguments that can be seen. Sizes are int64; floats are IEEE fp32; keys and values are bf16 (uint16). A call uses the
 * whole team; calls on one team wait for one another. */
#pragma once

#include <stdint.h>

#if defined(_WIN32)
#define TE_API __declspec(dllexport)
#else
#define TE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define TE_VERSION 6

enum { TE_Q8 = 0, TE_Q4_0 = 1, TE_Q4_1 = 2 };                  /* weight formats, blocks of 32 */
enum { TE_FROM_FLOAT = 0, TE_FROM_GGUF = 1 };                  /* fp32 rows to quantise; GGUF blocks of that format */

/* Names of tensors. Per layer (layer 0 in a head), then those of the whole model (layer ignored). */
enum {
  TE_Q = 0, TE_K = 1, TE_V = 2, TE_O = 3, TE_GATE = 4, TE_UP = 5, TE_DOWN = 6,               /* matrices */
  TE_EMBEDDING = 16, TE_LM_HEAD = 17, TE_FC = 18,
  TE_ATTENTION_NORM = 32, TE_MLP_NORM = 33, TE_Q_BIAS = 34, TE_K_BIAS = 35, TE_V_BIAS = 36,  /* vectors */
  TE_O_BIAS = 37, TE_Q_NORM = 38, TE_K_NORM = 39,
  TE_FINAL_NORM = 48, TE_HIDDEN_NORM = 49
};

typedef struct te_team te_team;
typedef struct te_model te_model;
typedef struct te_head te_head;

typedef struct {
  int64_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary;
  int64_t max_positions, max_rows;
  float eps, embedding_scale, residual_scale, logit_scale;
} te_model_config;

typedef struct {
  int64_t hidden, feature_width, intermediate, heads, kv_heads, head_dim, vocabulary; /* vocabulary: the draft's */
  int64_t max_positions, max_rows, max_scored;
  int64_t max_expanded;  /* nodes that the head may run on in one tree */
  float eps;
  int32_t norm_before_residual, norm_output;
} te_head_config;

/* Row m reads prefix[0..prefix_count), then what is its own, in the order of the lists. The first of these that is not
 * null says what that is:
 * own: rows of separate sequences: own[m * own_stride + i] for i < own_counts[m].
 * parents: the last `rows` entries of tree are the rows of this pass; row m reads its ancestors, then itself. The parent
 *   of tree[r] is tree[parents[r]], parents[r] < r, or none where parents[r] is -1.
 * visible: tree[r] for every r with visible[m * tree_count + r] != 0. A row normally reads its own slot.
 * Without any of them: tree[r] for r <= m (a causal chunk, tree_count = rows). */
typedef struct {
  int64_t rows;
  const int64_t* ids;
  const int64_t* positions;
  const int64_t* slots;
  const int64_t* prefix;
  int64_t prefix_count;
  const int64_t* tree;
  int64_t tree_count;
  const uint8_t* visible;
  const int32_t* parents;     /* [tree_count] or null */
  const int32_t* own;         /* [rows, own_stride] slots or null */
  const int32_t* own_counts;  /* [rows], each at most own_stride */
  int64_t own_stride;
} te_pass;

typedef struct {
  uint16_t* keys;   /* [layers, slots, kv_heads, head_dim]; a head has one layer */
  uint16_t* values;
  int64_t slots;
} te_kv;

typedef struct {
  const int64_t* logit_rows; int64_t logit_count;
  float* logits;    /* [logit_count, vocabulary] or null */
  int64_t* best;    /* [logit_count] argmax or null; logits may be null, then they never go to memory */
  float* peaks;     /* [logit_count] the logit at `best`, NaN where one of the row is not finite; null without `best` */
  float* hidden;    /* [logit_count, hidden] after the final norm, or null */
  const int64_t* taps; int64_t tap_count;  /* 0 = embeddings, l = residual stream entering layer l, layers = after the final norm */
  float* features;  /* [rows, tap_count * hidden] or null */
} te_wanted;

typedef struct {
  const float* features;       /* [rows, feature_width], or null and then */
  const float* hidden;         /* [hidden_count, hidden]: states of an earlier call, of which row m reads */
  const int64_t* hidden_rows;  /* [rows] the one named here; null: the m-th, hidden_count = rows */
  int64_t hidden_count;
} te_head_input;

typedef struct {
  float* hidden;               /* [rows, hidden] or null */
  const int64_t* scored_rows; int64_t scored_count;
  int64_t top;
  float* log_probs;            /* [scored_count, top] */
  int64_t* ids;                /* [scored_count, top] ids of the target's vocabulary */
} te_head_wanted;

/* A whole draft tree. First come rows with true features, each of which reads the prefix and those before it. Below the last
 * one, the root, levels are scored one after another, whose rows go to scratch slots. */
typedef struct {
  int64_t rows;
  const int64_t* ids;      /* [rows], the root's last */
  const int64_t* table;    /* [prefix_count + rows] slots in reading order: the prefix, then the rows' own */
  int64_t prefix_count;
  int64_t position;        /* rotary, of the first row; the others follow */
  const float* features;   /* [feature_count, feature_width], of which row m reads ... */
  const int64_t* feature_rows; /* ... [rows] the one named here; null: the m-th, feature_count = rows */
  int64_t feature_count;
  int64_t scratch;         /* the first of ... */
  int64_t scratch_count;   /* ... so many slots that nobody else uses, at least (depth - 1) * branching */
} te_tree_input;

/* How the tree grows. Of a level at most `branching` nodes are expanded, never a stop id, each to `branching` children or the
 * whole vocabulary; of all nodes scored at most the best `nodes` are kept.
 * Without `verify`: the rule of EAGLE-2. Nodes rank by the log-probability of their path.
 * With it: nodes rank by their chance of being walked, and the tree grows while the tokens expected of it are worth more
 * than their cost. The log odds of a node to be walked, once its parent is, are a shift plus a slope times those that the
 * head gives it. */
typedef struct {
  int64_t depth, branching, nodes;
  const int64_t* stop_ids; int64_t stop_count;
  const double* verify;    /* [nodes + 3] cost of a target pass over so many rows, in tokens; or null */
  const double* draft;     /* [depth + 1] cost of so many levels, in tokens */
  const double* continues; /* [depth + 1] chance that a walk which could go on to this depth does */
  const double* calibration; /* [2] shift and slope of the log odds */
  double least;            /* above 0: a chance is that far from 0 and from 1 */
} te_growth;

typedef struct {
  int64_t* tokens;    /* each [capacity]; row 0 is the root, parents come before children */
  int64_t* parents;   /* rows, -1 for the root */
  int64_t* depths;
  double* log_probs;  /* of the path from the root */
  int64_t capacity;   /* at least nodes + 1 */
  int64_t rows;       /* filled in; 0: a score was not finite, and there is no tree */
  int64_t levels;     /* filled in: levels scored, all of them finite */
} te_tree;

/* How a token is drawn from a row of scores, in this order; `treeeagle_edge/sampling.py` is the definition. */
typedef struct {
  double temperature;  /* above 0 */
  int64_t top_k;       /* 0: off */
  double top_p;        /* above 0; 1: off */
  double min_p;        /* 0: off */
  uint64_t seed;
} te_sampling;

TE_API int64_t te_version(void);
TE_API const char* te_error(void);   /* of this thread's last failure */
TE_API const char* te_isas(void);    /* usable instruction sets, best first, comma-separated */

/* isa null or "": the best. spin_us: how long idle workers stay awake. */
TE_API int te_team_create(int64_t threads, const char* isa, int64_t spin_us, te_team** out);
TE_API const char* te_team_isa(const te_team* team);
TE_API void te_team_destroy(te_team* team);  /* after its models and heads */

TE_API int te_model_create(te_team* team, const te_model_config* config, te_model** out);
TE_API int te_model_matrix(te_model* model, int64_t layer, int32_t name, int32_t format, int32_t source, const void* data,
                           int64_t bytes);
TE_API int te_model_vector(te_model* model, int64_t layer, int32_t name, const float* data, int64_t count);
TE_API int te_model_rope(te_model* model, const float* cos, const float* sin, int64_t count); /* [max_positions, head_dim/2] */
TE_API int te_model_ready(te_model* model);  /* checks that nothing is missing */
TE_API int64_t te_model_bytes(const te_model* model);
TE_API int te_model_embed(const te_model* model, const int64_t* ids, int64_t count, float* out); /* unscaled rows */
TE_API int te_forward(te_model* model, const te_pass* pass, const te_kv* kv, const te_wanted* wanted);
TE_API void te_model_destroy(te_model* model);  /* after its heads */

TE_API int te_head_create(te_model* target, const te_head_config* config, te_head** out);
TE_API int te_head_matrix(te_head* head, int32_t name, int32_t format, int32_t source, const void* data, int64_t bytes);
TE_API int te_head_vector(te_head* head, int32_t name, const float* data, int64_t count);
TE_API int te_head_rope(te_head* head, const float* cos, const float* sin, int64_t count);
TE_API int te_head_ids(te_head* head, const int64_t* target_ids, int64_t count); /* draft id -> target id; default: the same */
TE_API int te_head_ready(te_head* head);
TE_API int64_t te_head_bytes(const te_head* head);
TE_API int te_draft(te_head* head, const te_pass* pass, const te_kv* kv, const te_head_input* input,
                    const te_head_wanted* wanted);
TE_API int te_draft_tree(te_head* head, const te_tree_input* input, const te_kv* kv, const te_growth* growth, te_tree* tree);
TE_API void te_head_destroy(te_head* head);

/* The token of scores [count] that the seed's noise at `position` chooses. At least one score is above -infinity; NaN is never
 * chosen. */
TE_API int te_draw(te_team* team, const float* scores, int64_t count, const te_sampling* sampling, uint64_t position,
                   int64_t* token);

/* Single operations, for tests: y[rows, n] = x[rows, k] . w, as a model would compute it. */
TE_API int te_matmul(te_team* team, int32_t format, int32_t source, const void* data, int64_t bytes, int64_t n, int64_t k,
                     const float* x, int64_t rows, float* y);
TE_API int te_attention(te_team* team, const float* query, int64_t heads, int64_t kv_heads, int64_t head_dim,
                        const te_pass* pass, const te_kv* kv, float* out);
TE_API int te_unpack(int32_t format, int32_t source, const void* data, int64_t bytes, int64_t n, int64_t k, float* out);

#ifdef __cplusplus
}
#endif
