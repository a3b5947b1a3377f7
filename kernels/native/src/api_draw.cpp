// The C interface: drawing tokens.
#include "check.h"

using namespace te;

int te_draw(te_team* team, const float* scores, int64_t count, const te_sampling* s, uint64_t position, int64_t* token) {
  return guarded([&] {
    need(team, "team");
    need(scores, "scores");
    need(s, "sampling");
    need(token, "token");
    need_between(count, 1, 1 << 24, "count");
    need_between(s->top_k, 0, INT64_MAX, "top_k");
    if (!(s->temperature > 0.0)) refuse("temperature is %g, not above 0", s->temperature);
    if (!(s->top_p > 0.0 && s->top_p <= 1.0)) refuse("top_p is %g, not above 0 and at most 1", s->top_p);
    if (!(s->min_p >= 0.0 && s->min_p <= 1.0)) refuse("min_p is %g, outside 0..1", s->min_p);
    const Sampling sampling{s->temperature, s->top_k, s->top_p, s->min_p, s->seed};
    const std::lock_guard<std::mutex> lock(team->busy);
    const int64_t found = team->draw.token(scores, count, sampling, position, team->kernels, team->team);
    if (found < 0) refuse("no score is above -infinity");
    *token = found;
  });
}
