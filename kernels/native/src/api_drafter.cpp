// The C interface: whole draft trees.
#include <algorithm>

#include "check.h"

using namespace te;

namespace {

Growth checked_growth(const te_growth* g, const HeadConfig& head) {
  need(g, "growth");
  need_between(g->branching, 1, std::min<int64_t>(256, head.max_scored), "branching");
  need_between(g->depth, 1, head.max_rows, "depth");
  need_between((g->depth - 1) * g->branching, 0, head.max_expanded, "(depth - 1) * branching");
  need_between(g->nodes, 1, INT32_MAX, "nodes");
  need_between(g->stop_count, 0, INT32_MAX, "stop_count");
  Growth growth;
  growth.depth = g->depth;
  growth.branching = g->branching;
  growth.nodes = g->nodes;
  growth.stop_count = g->stop_count;
  if (g->stop_count > 0) need(g->stop_ids, "stop_ids");
  growth.stop_ids = g->stop_ids;
  if (!g->verify) return growth;
  need(g->verify, "verify");
  need(g->draft, "draft");
  need(g->continues, "continues");
  need(g->calibration, "calibration");
  if (!(g->least > 0.0 && g->least < 0.5)) refuse("least is %g, outside 0..0.5", g->least);
  growth.verify = g->verify;
  growth.draft = g->draft;
  growth.continues = g->continues;
  growth.calibration = g->calibration;
  growth.least = g->least;
  return growth;
}

TrueRows checked_rows(const te_tree_input* i, const te_kv* kv, const Head& head, const Growth& growth) {
  need(i, "input");
  need_store(kv);
  need_between(i->rows, 1, head.config.max_rows, "rows");
  need(i->ids, "ids");
  need_range(i->ids, i->rows, head.target.config.vocabulary, "ids");
  need_between(i->prefix_count, 0, INT32_MAX, "prefix_count");
  need(i->table, "table");
  need_range(i->table, i->prefix_count + i->rows, kv->slots, "table");
  need(i->features, "features");
  need_between(i->feature_count, 1, INT32_MAX, "feature_count");
  if (i->feature_rows) {
    need(i->feature_rows, "feature_rows");
    need_range(i->feature_rows, i->rows, i->feature_count, "feature_rows");
  } else if (i->feature_count != i->rows) {
    refuse("without `feature_rows`, feature_count (%lld) must equal rows (%lld)", static_cast<long long>(i->feature_count),
           static_cast<long long>(i->rows));
  }
  need_between(i->position, 0, head.config.max_positions - i->rows - (growth.depth - 1), "position");
  const int64_t expanded = (growth.depth - 1) * growth.branching;
  need_between(i->scratch_count, expanded, kv->slots, "scratch_count");
  need_between(i->scratch, 0, kv->slots - i->scratch_count, "scratch");
  return {i->rows, i->ids, i->table, i->prefix_count, i->position, i->features, i->feature_rows};
}

Tree checked_tree(const te_tree* t, const Growth& growth) {
  need(t, "tree");
  need_between(t->capacity, growth.nodes + 1, INT32_MAX, "capacity");
  need(t->tokens, "tokens");
  need(t->parents, "parents");
  need(t->depths, "depths");
  need(t->log_probs, "log_probs");
  return {t->tokens, t->parents, t->depths, t->log_probs, 0, 0};
}

}  // namespace

int te_draft_tree(te_head* head, const te_tree_input* input, const te_kv* kv, const te_growth* g, te_tree* t) {
  return guarded([&] {
    need(head, "head");
    if (!head->ready) refuse("the head is not ready");
    const std::lock_guard<std::mutex> lock(head->owner.busy);
    const Growth growth = checked_growth(g, head->head.config);
    const TrueRows rows = checked_rows(input, kv, head->head, growth);
    Tree tree = checked_tree(t, growth);
    head->drafter.draft(rows, {kv->keys, kv->values}, input->scratch, growth, tree);
    t->rows = tree.rows;
    t->levels = tree.levels;
  });
}
