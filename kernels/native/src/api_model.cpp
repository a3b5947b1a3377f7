// The C interface: teams and models.
#include <cstring>

#include "check.h"

using namespace te;

const char* te_isas(void) { return kernel_names(); }

int te_team_create(int64_t threads, const char* isa, int64_t spin_us, te_team** out) {
  return guarded([&] {
    need(out, "out");
    need_between(threads, 1, 256, "threads");
    need_between(spin_us, 0, 10'000'000, "spin_us");
    const Kernels* kernels = find_kernels(isa);
    if (!kernels) refuse("instruction set \"%s\" is not here; there are: %s", isa, kernel_names());
    *out = new te_team(static_cast<int>(threads), spin_us, *kernels);
  });
}

const char* te_team_isa(const te_team* team) { return team ? team->kernels.name : ""; }
void te_team_destroy(te_team* team) { delete team; }

int te_model_create(te_team* team, const te_model_config* c, te_model** out) {
  return guarded([&] {
    need(team, "team");
    need(c, "config");
    need(out, "out");
    ModelConfig config;
    config.layer = checked_shape(c->hidden, c->hidden, c->intermediate, c->heads, c->kv_heads, c->head_dim, c->eps,
                                 c->residual_scale);
    need_between(c->layers, 1, 1024, "layers");
    need_between(c->vocabulary, 1, 1 << 24, "vocabulary");
    need_between(c->max_positions, 1, 1 << 24, "max_positions");
    need_between(c->max_rows, 1, 4096, "max_rows");
    config.layers = c->layers;
    config.vocabulary = c->vocabulary;
    config.max_positions = c->max_positions;
    config.max_rows = c->max_rows;
    config.embedding_scale = c->embedding_scale;
    config.logit_scale = c->logit_scale;
    *out = new te_model(*team, config);
  });
}

void te_model_destroy(te_model* model) { delete model; }

int te_model_matrix(te_model* model, int64_t layer, int32_t name, int32_t format, int32_t source, const void* data,
                    int64_t bytes) {
  return guarded([&] {
    need(model, "model");
    Model& m = model->model;
    const ModelConfig& c = m.config;
    const std::lock_guard<std::mutex> lock(model->owner.busy);
    if (name == TE_EMBEDDING || name == TE_LM_HEAD) {
      fill_matrix(m.team, name == TE_EMBEDDING ? m.embedding : m.lm_head, format, source, data, bytes, c.vocabulary, c.layer.hidden,
                  true);
      return;
    }
    need_between(layer, 0, c.layers - 1, "layer");
    Matrix* to = nullptr;
    int64_t n = 0, k = 0;
    if (!layer_matrix(m.layers[static_cast<size_t>(layer)], c.layer, name, to, n, k)) refuse("a model has no matrix %d", name);
    fill_matrix(m.team, *to, format, source, data, bytes, n, k);
  });
}

int te_model_vector(te_model* model, int64_t layer, int32_t name, const float* data, int64_t count) {
  return guarded([&] {
    need(model, "model");
    Model& m = model->model;
    if (name == TE_FINAL_NORM) return fill_vector(m.final_norm, data, count, m.config.layer.hidden, "final norm");
    need_between(layer, 0, m.config.layers - 1, "layer");
    Vector* to = nullptr;
    int64_t expected = 0;
    if (!layer_vector(m.layers[static_cast<size_t>(layer)], m.config.layer, name, to, expected))
      refuse("a model has no vector %d", name);
    fill_vector(*to, data, count, expected, "vector");
  });
}

int te_model_rope(te_model* model, const float* cos, const float* sin, int64_t count) {
  return guarded([&] {
    need(model, "model");
    const ModelConfig& c = model->model.config;
    fill_rope(model->model.rope, cos, sin, count, c.max_positions, c.layer.attention.head_dim);
  });
}

int te_model_ready(te_model* model) {
  return guarded([&] {
    need(model, "model");
    const Model& m = model->model;
    for (size_t l = 0; l < m.layers.size(); ++l) need_layer(m.layers[l], static_cast<int64_t>(l));
    if (!m.embedding.present()) refuse("the embedding is missing");
    if (!m.final_norm.size()) refuse("the final norm is missing");
    if (!m.rope.cos.size()) refuse("the rotary tables are missing");
    model->ready = true;
  });
}

int64_t te_model_bytes(const te_model* model) {
  if (!model) return 0;
  const Model& m = model->model;
  int64_t total = m.embedding.memory.bytes() + m.lm_head.memory.bytes() + m.final_norm.bytes();
  for (const LayerWeights& layer : m.layers) total += layer_bytes(layer);
  return total;
}

int te_model_embed(const te_model* model, const int64_t* ids, int64_t count, float* out) {
  return guarded([&] {
    need(model, "model");
    need(ids, "ids");
    need(out, "out");
    if (!model->ready) refuse("the model is not ready");
    need_between(count, 0, INT32_MAX, "count");
    need_range(ids, count, model->model.config.vocabulary, "ids");
    for (int64_t i = 0; i < count; ++i) model->model.embed(ids[i], out + i * model->model.config.layer.hidden);
  });
}

int te_forward(te_model* model, const te_pass* pass, const te_kv* kv, const te_wanted* w) {
  return guarded([&] {
    need(model, "model");
    if (!model->ready) refuse("the model is not ready");
    Model& m = model->model;
    const std::lock_guard<std::mutex> lock(model->owner.busy);
    const Pass ours = checked_pass(pass, kv, m.space, m.config.vocabulary, m.config.max_positions);
    need(w, "wanted");
    need_between(w->logit_count, 0, m.config.max_rows, "logit_count");
    if (w->logit_count > 0) need(w->logit_rows, "logit_rows");
    need_range(w->logit_rows, w->logit_count, pass->rows, "logit_rows");
    need_aligned(w->logits, "logits");
    need_aligned(w->best, "best");
    need_aligned(w->peaks, "peaks");
    need_aligned(w->hidden, "hidden");
    if (w->peaks && !w->best) refuse("`peaks` needs `best`");
    need_between(w->tap_count, 0, 64, "tap_count");
    if (w->tap_count > 0) {
      need(w->taps, "taps");
      need(w->features, "features");
      need_range(w->taps, w->tap_count, m.config.layers + 1, "taps");
    }
    Wanted wanted;
    wanted.logit_rows = w->logit_rows;
    wanted.logit_count = w->logit_count;
    wanted.logits = w->logits;
    wanted.best = w->best;
    wanted.peaks = w->peaks;
    wanted.hidden = w->hidden;
    wanted.taps = w->taps;
    wanted.tap_count = w->tap_count;
    wanted.features = w->features;
    m.forward(ours, kv->keys, kv->values, kv->slots, wanted);
  });
}
