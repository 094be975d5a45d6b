/* The doctor's findings about the network: interfaces, hosts and pairs of hosts. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/doctor/judge.h"

#define SAY(text, ...) doctor_say(text, sizeof(text), __VA_ARGS__)

/* --- Interfaces --------------------------------------------------------------------------------*/

/* By how much another subnet must be faster. Gigabit and 2.5 Gbit/s are further apart, the runs of
 * one and the same link are not. */
#define INTERFACE_RATIO 1.6
/* What takes less than this part of the traffic is not used. */
#define SPREAD_PART 0.1

static const struct doctor_interface *interface_of(const struct doctor_facts *facts, int host,
                                                   int subnet) {
  return doctor_interface_in(&facts->hosts[host], facts->subnets[subnet].network,
                             facts->subnets[subnet].netmask);
}

static int fastest_subnet(const struct doctor_facts *facts) {
  int best = -1;
  for (int s = 0; s < facts->subnet_count; s++)
    if (facts->subnets[s].rate[0] > 0 &&
        (best < 0 || facts->subnets[s].rate[0] > facts->subnets[best].rate[0]))
      best = s;
  return best;
}

static void judge_wrong(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                        int used, int best) {
  const struct doctor_subnet *slow = &facts->subnets[used], *fast = &facts->subnets[best];
  char slow_network[DOCTOR_ADDRESS], fast_network[DOCTOR_ADDRESS];
  struct doctor_finding *finding = doctor_add(diagnosis, DOCTOR_WRONG_INTERFACE, -1);
  const char *name = interface_of(facts, 0, best)->name;
  SAY(finding->seen,
      "MPI's traffic takes %s (%s), where plain TCP carries %.2f Gbit/s; %s (%s), which all hosts "
      "have too, carries %.2f",
      interface_of(facts, 0, used)->name,
      doctor_network(slow->network, slow->netmask, slow_network), slow->rate[0], name,
      doctor_network(fast->network, fast->netmask, fast_network), fast->rate[0]);
  SAY(finding->why, "every exchange could be %.1f times as fast", fast->rate[0] / slow->rate[0]);
  SAY(finding->set, "let MPI use %s alone", name);
  diagnosis->set_subnet = best;
}

/* Whether a host sends in both. Where one host takes another interface than the others, it is that
 * host which is odd. */
static bool sends_in_both(const struct doctor_facts *facts, int subnet, int other) {
  for (int h = 0; h < facts->host_count; h++)
    if (doctor_part_of(facts, h, subnet) >= SPREAD_PART &&
        doctor_part_of(facts, h, other) >= SPREAD_PART)
      return true;
  return false;
}

/* Open MPI takes all interfaces that it may, and cuts long messages among them. */
static bool judge_spread(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                         int best) {
  for (int s = 0; s < facts->subnet_count; s++) {
    const struct doctor_subnet *slow = &facts->subnets[s], *fast = &facts->subnets[best];
    if (s == best || !sends_in_both(facts, s, best) || slow->rate[0] <= 0 ||
        fast->rate[0] < INTERFACE_RATIO * slow->rate[0])
      continue;
    struct doctor_finding *finding = doctor_add(diagnosis, DOCTOR_SPREAD, -1);
    SAY(finding->seen,
        "%.0f %% of MPI's traffic takes %s, where plain TCP carries %.2f Gbit/s, and %.0f %% takes "
        "%s, which carries %.2f",
        100 * doctor_part_of(facts, -1, s), interface_of(facts, 0, s)->name, slow->rate[0],
        100 * doctor_part_of(facts, -1, best), interface_of(facts, 0, best)->name, fast->rate[0]);
    SAY(finding->why, "a message that is cut among both arrives when its slower part does");
    SAY(finding->set, "let MPI use %s alone", interface_of(facts, 0, best)->name);
    diagnosis->set_subnet = best;
    return true;
  }
  return false;
}

static void judge_odd(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                      int used) {
  for (int h = 0; h < facts->host_count; h++) {
    double part;
    char network[DOCTOR_ADDRESS], address[DOCTOR_ADDRESS];
    const struct doctor_interface *carrier = doctor_carrier(facts, h, &part);
    const struct doctor_interface *common = interface_of(facts, h, used);
    if (!carrier || (double)common->sent >= SPREAD_PART * (double)carrier->sent)
      continue;
    struct doctor_finding *finding = doctor_add(diagnosis, DOCTOR_ODD_INTERFACE, h);
    SAY(finding->seen,
        "%s: %.0f %% of what it sends takes %s (%s); most hosts send in %s, which it has as %s",
        facts->hosts[h].name, 100 * part, carrier->name, doctor_address(carrier->address, address),
        doctor_network(facts->subnets[used].network, facts->subnets[used].netmask, network),
        common->name);
    SAY(finding->why, "its way to the others is another one, and may be a slower one");
    SAY(finding->set,
        "name the interface, the same on every host; its routes if it is named: ip route there");
    if (diagnosis->set_subnet < 0)
      diagnosis->set_subnet = used;
  }
}

/* Devices whose link runs at a speed that plain TCP stays far below; 25 Gbit/s and more are beyond
 * what one process can be asked to fill. */
#define LINK_PART 0.6
enum { LINK_MOST = 25000 };

static void judge_link(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                       int used) {
  int speed = 0, mtu = 0;
  double best = 0;
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *interface = interface_of(facts, h, used);
    if (!interface->physical || interface->speed <= 0 || interface->speed > LINK_MOST)
      return;
    if (speed == 0 || interface->speed < speed)
      speed = interface->speed;
    mtu = interface->mtu;
  }
  for (int i = 0; i < DOCTOR_STREAMS; i++)
    best = fmax(best, facts->subnets[used].rate[i]);
  if (best <= 0 || best >= LINK_PART * speed * 1e-3)
    return;
  struct doctor_finding *finding = doctor_add(diagnosis, DOCTOR_LINK_SPEED, -1);
  SAY(finding->seen, "plain TCP carries %.2f Gbit/s at best, the slowest link says %.1f", best,
      speed * 1e-3);
  SAY(finding->why, "something between the hosts, or the hosts themselves, holds the traffic back");
  SAY(finding->set, "look for errors in ethtool -S, for other traffic, for a slower switch%s",
      speed >= 10000 && mtu <= 1500 ? "; MTU 9000 on hosts and switch, if processors are busy"
                                    : "");
}

void doctor_judge_interfaces(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  int used = doctor_used_subnet(facts), best = fastest_subnet(facts);
  if (used < 0)
    return;
  if (best >= 0 && !judge_spread(facts, diagnosis, best) && best != used &&
      facts->subnets[used].rate[0] > 0 &&
      facts->subnets[best].rate[0] >= INTERFACE_RATIO * facts->subnets[used].rate[0])
    judge_wrong(facts, diagnosis, used, best);
  judge_odd(facts, diagnosis, used);
  judge_link(facts, diagnosis, used);
}

/* --- Hosts and pairs ---------------------------------------------------------------------------*/

#define HOST_RATIO 1.6
#define PAIR_RATIO 2.0 /* pairs are many, and one of many is more often late by chance */
#define LATE_RATIO 3.0
#define LATE_MICROSECONDS                                                                          \
  100.0 /* less is a longer cable or another switch, and costs no exchange */

static void add_slow_host(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                          int host, bool sends, bool receives, double others) {
  struct doctor_finding *finding = doctor_add(diagnosis, DOCTOR_SLOW_HOST, host);
  double part, rate = doctor_best_rate(facts, host, sends);
  const struct doctor_interface *carrier = doctor_carrier(facts, host, &part);
  SAY(finding->seen, "%s: %.2f Gbit/s %s every other host, the others %.2f",
      facts->hosts[host].name, rate,
      sends && receives ? "to and from"
      : sends           ? "to"
                        : "from",
      others);
  if (carrier && carrier->physical && carrier->speed > 0)
    SAY(finding->seen, "; its link says %.1f", carrier->speed * 1e-3);
  SAY(finding->why, "every exchange waits for the slowest host");
  SAY(finding->set,
      "its link, cable or switch port, or a limit on its rate: ethtool %s and tc qdisc "
      "show dev %s there",
      carrier ? carrier->name : "IFACE", carrier ? carrier->name : "IFACE");
}

static void judge_slow_hosts(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                             double *sends, double *receives) {
  int hosts = facts->host_count;
  for (int h = 0; h < hosts; h++) {
    sends[h] = doctor_best_rate(facts, h, true);
    receives[h] = doctor_best_rate(facts, h, false);
  }
  for (int h = 0; h < hosts; h++) {
    bool out = doctor_outlier(sends[h], sends, hosts, HOST_RATIO, true);
    bool in = doctor_outlier(receives[h], receives, hosts, HOST_RATIO, true);
    double most = 0;
    for (int other = 0; other < hosts; other++)
      most = fmax(most, out ? sends[other] : receives[other]);
    if (out || in)
      add_slow_host(facts, diagnosis, h, out, in, most);
  }
}

static void judge_late_hosts(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                             double *times) {
  int hosts = facts->host_count;
  for (int h = 0; h < hosts; h++)
    times[h] = doctor_best_round_trip(facts, h);
  for (int h = 0; h < hosts; h++) {
    double best = times[h];
    for (int other = 0; other < hosts; other++)
      if (times[other] > 0)
        best = fmin(best, times[other]);
    if (!doctor_outlier(times[h], times, hosts, LATE_RATIO, false) ||
        times[h] < best + LATE_MICROSECONDS)
      continue;
    struct doctor_finding *finding = doctor_add(diagnosis, DOCTOR_LATE_HOST, h);
    SAY(finding->seen, "%s: a round trip takes %.0f us to any other host, %.0f us among others",
        facts->hosts[h].name, times[h], best);
    SAY(finding->why, "small messages wait for it");
    SAY(finding->set, "its way to the others (switches, routing), power saving or load on it");
  }
}

/* What two hosts could do, by what each does with others; of two hosts only the ways differ. */
static double expected_rate(const struct doctor_facts *facts, int from, int to) {
  if (facts->host_count == 2)
    return fmax(facts->bandwidth[1], facts->bandwidth[2]);
  return fmin(doctor_best_rate(facts, from, true), doctor_best_rate(facts, to, false));
}

static void judge_pairs(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  int hosts = facts->host_count;
  for (int from = 0; from < hosts; from++)
    for (int to = 0; to < hosts; to++) {
      double rate = facts->bandwidth[from * hosts + to], expected = expected_rate(facts, from, to);
      if (rate <= 0 || rate * PAIR_RATIO > expected)
        continue;
      struct doctor_finding *finding = doctor_add(diagnosis, DOCTOR_SLOW_PAIR, from);
      SAY(finding->seen, "%s to %s: %.2f Gbit/s, where %.2f is what %s", facts->hosts[from].name,
          facts->hosts[to].name, rate, expected,
          hosts == 2 ? "the other way carries" : "each reaches with other hosts");
      SAY(finding->why, "exchanges that use this way wait for it");
      SAY(finding->set, "%s",
          hosts == 2 ? "the sender's or the receiver's link: ethtool on both"
                     : "the way between these two: switches, cables, routing");
    }
}

void doctor_judge_hosts(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  double *room = calloc(2 * (size_t)facts->host_count, sizeof *room);
  if (!room)
    return;
  judge_slow_hosts(facts, diagnosis, room, room + facts->host_count);
  judge_late_hosts(facts, diagnosis, room);
  judge_pairs(facts, diagnosis);
  free(room);
}
