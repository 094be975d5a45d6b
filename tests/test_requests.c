/* Nonblocking calls: any number of plans and requests in flight, finished in any order, on ranks
 * that are threads. */
#include <criterion/criterion.h>

#include "tests/support_requests.h"

TestSuite(requests, .timeout = 120);

static void on_groups(rank_body *scenario, int smallest) {
  static const int sizes[] = {1, 2, 3, 4, 8};
  for (size_t p = 0; p < sizeof sizes / sizeof sizes[0]; p++) {
    if (sizes[p] < smallest)
      continue;
    struct flight *flight = flight_prepare(sizes[p]);
    on_ranks(sizes[p], scenario, flight);
    flight_release(flight);
  }
}

Test(requests, waited_for_in_any_order) { on_groups(waited_in_any_order, 1); }
Test(requests, started_in_any_order_and_tested) { on_groups(started_in_any_order_and_tested, 1); }
Test(requests, moved_by_progress) { on_groups(moved_by_progress, 1); }
Test(requests, busy_plans_refuse) { on_groups(busy_plans_refuse, 1); }
Test(requests, late_rank_is_waited_for) { on_groups(late_rank_is_waited_for, 2); }
Test(requests, threads_share_a_communicator) { on_groups(threads_share_a_communicator, 1); }
