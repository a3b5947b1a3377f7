// The C interface: draft heads.
#include <algorithm>
#include <cstring>

#include "check.h"

using namespace te;

int te_head_create(te_model* target, const te_head_config* c, te_head** out) {
  return guarded([&] {
    need(target, "target");
    need(c, "config");
    need(out, "out");
    HeadConfig config;
    need_between(c->hidden, kBlock, 1 << 20, "hidden");  // before it is doubled
    config.layer =
        checked_shape(c->hidden, 2 * c->hidden, c->intermediate, c->heads, c->kv_heads, c->head_dim, c->eps, 1.0f);
    need_between(c->feature_width, kBlock, 1 << 20, "feature_width");
    need_between(c->vocabulary, 1, target->model.config.vocabulary, "vocabulary of the draft");
    need_between(c->max_positions, 1, 1 << 24, "max_positions");
    need_between(c->max_rows, 1, 4096, "max_rows");
    need_between(c->max_scored, 1, c->max_rows, "max_scored");
    need_between(c->max_expanded, 0, 4096, "max_expanded");
    config.feature_width = c->feature_width;
    config.vocabulary = c->vocabulary;
    config.max_positions = c->max_positions;
    config.max_rows = c->max_rows;
    config.max_scored = c->max_scored;
    config.max_expanded = c->max_expanded;
    config.norm_before_residual = c->norm_before_residual != 0;
    config.norm_output = c->norm_output != 0;
    *out = new te_head(*target, config);
  });
}

void te_head_destroy(te_head* head) { delete head; }

int te_head_matrix(te_head* head, int32_t name, int32_t format, int32_t source, const void* data, int64_t bytes) {
  return guarded([&] {
    need(head, "head");
    Head& h = head->head;
    const HeadConfig& c = h.config;
    Team& team = h.target.team;
    const std::lock_guard<std::mutex> lock(head->owner.busy);
    Matrix* to = nullptr;
    int64_t n = 0, k = 0;
    if (name == TE_FC) return fill_matrix(team, h.fc, format, source, data, bytes, c.layer.hidden, c.feature_width);
    if (name == TE_LM_HEAD) return fill_matrix(team, h.lm_head, format, source, data, bytes, c.vocabulary, c.layer.hidden);
    if (name == TE_EMBEDDING)
      return fill_matrix(team, h.embedding, format, source, data, bytes, h.target.config.vocabulary, c.layer.hidden);
    if (!layer_matrix(h.layer, c.layer, name, to, n, k)) refuse("a head has no matrix %d", name);
    fill_matrix(team, *to, format, source, data, bytes, n, k);
  });
}

int te_head_vector(te_head* head, int32_t name, const float* data, int64_t count) {
  return guarded([&] {
    need(head, "head");
    Head& h = head->head;
    const int64_t width = h.config.layer.hidden;
    if (name == TE_FINAL_NORM) return fill_vector(h.final_norm, data, count, width, "final norm");
    if (name == TE_HIDDEN_NORM) return fill_vector(h.hidden_norm, data, count, width, "hidden norm");
    Vector* to = nullptr;
    int64_t expected = 0;
    if (!layer_vector(h.layer, h.config.layer, name, to, expected)) refuse("a head has no vector %d", name);
    fill_vector(*to, data, count, expected, "vector");
  });
}

int te_head_rope(te_head* head, const float* cos, const float* sin, int64_t count) {
  return guarded([&] {
    need(head, "head");
    const HeadConfig& c = head->head.config;
    fill_rope(head->head.rope, cos, sin, count, c.max_positions, c.layer.attention.head_dim);
  });
}

int te_head_ids(te_head* head, const int64_t* target_ids, int64_t count) {
  return guarded([&] {
    need(head, "head");
    need(target_ids, "target_ids");
    Head& h = head->head;
    if (count != h.config.vocabulary) refuse("target_ids must have one id for each of the draft's vocabulary");
    need_range(target_ids, count, h.target.config.vocabulary, "target_ids");
    std::memcpy(h.target_ids.data(), target_ids, static_cast<size_t>(count) * sizeof(int64_t));
  });
}

int te_head_ready(te_head* head) {
  return guarded([&] {
    need(head, "head");
    const Head& h = head->head;
    need_layer(h.layer, 0);
    if (!h.fc.present()) refuse("fc is missing");
    if (!h.lm_head.present()) refuse("lm_head is missing");
    if (!h.final_norm.size() || !h.hidden_norm.size()) refuse("a norm of the head is missing");
    if (!h.rope.cos.size()) refuse("the rotary tables are missing");
    if (!h.embedding.present() && h.target.config.layer.hidden != h.config.layer.hidden)
      refuse("the head is not as wide as the target and brings no embedding");
    head->ready = true;
  });
}

int64_t te_head_bytes(const te_head* head) {
  if (!head) return 0;
  const Head& h = head->head;
  return layer_bytes(h.layer) + h.fc.memory.bytes() + h.lm_head.memory.bytes() + h.embedding.memory.bytes() +
         h.final_norm.bytes() + h.hidden_norm.bytes();
}

int te_draft(te_head* head, const te_pass* pass, const te_kv* kv, const te_head_input* input, const te_head_wanted* w) {
  return guarded([&] {
    need(head, "head");
    if (!head->ready) refuse("the head is not ready");
    Head& h = head->head;
    const std::lock_guard<std::mutex> lock(head->owner.busy);
    const Pass ours = checked_pass(pass, kv, h.space, h.target.config.vocabulary, h.config.max_positions);
    need(input, "input");
    if ((input->features != nullptr) == (input->hidden != nullptr)) refuse("give either features or hidden");
    need(input->features ? input->features : input->hidden, "features or hidden");
    if (input->hidden_rows) {
      need(input->hidden_rows, "hidden_rows");
      need_range(input->hidden_rows, pass->rows, input->hidden_count, "hidden_rows");
    } else if (input->hidden && input->hidden_count != pass->rows) {
      refuse("without `hidden_rows`, hidden_count (%lld) must equal rows (%lld)", static_cast<long long>(input->hidden_count),
             static_cast<long long>(pass->rows));
    }
    need(w, "wanted");
    need_aligned(w->hidden, "hidden");
    need_between(w->scored_count, 0, h.config.max_scored, "scored_count");
    if (w->scored_count > 0) {
      need(w->scored_rows, "scored_rows");
      need_range(w->scored_rows, w->scored_count, pass->rows, "scored_rows");
      need_between(w->top, 1, std::min<int64_t>(256, h.config.vocabulary), "top");
      need(w->log_probs, "log_probs");
      need(w->ids, "ids");
    }
    const HeadInput ours_input{input->features, input->hidden, input->hidden ? input->hidden_rows : nullptr};
    const HeadWanted wanted{w->hidden, w->scored_rows, w->scored_count, w->top, w->log_probs, w->ids};
    h.step(ours, {kv->keys, kv->values}, ours_input, wanted);
  });
}
