/* workspace.c: a plan's own workspace: one thread, and on a device one stream, may use it at a time. */
#include "plan/plan.h"

/* Besides its notes of bad writes the one thing that a forward changes in its plan. */
static folioi_workspace_use *use_of(const folio_plan *plan)
{
    return (folioi_workspace_use *)&plan->workspace_use;
}

folio_status folioi_plan_enter_workspace(const folio_plan *plan, void *stream)
{
    folioi_workspace_use *use = use_of(plan);
    REQUIRE(!atomic_exchange(&use->is_busy, true),
            "another thread is in a forward with the plan's own workspace; give each thread a "
            "run.workspace");
    bool is_other = use->is_bound && use->stream != stream;
    if (is_other) folioi_plan_leave_workspace(plan);
    REQUIRE(!is_other, "the plan's own workspace is used on another stream since the last update; "
                       "give this one a run.workspace");
    use->is_bound = true;
    use->stream = stream;
    return FOLIO_OK;
}

void folioi_plan_leave_workspace(const folio_plan *plan)
{
    atomic_store(&use_of(plan)->is_busy, false);
}
