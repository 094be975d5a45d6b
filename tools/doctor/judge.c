/* Makes the doctor's findings of the facts. Knows neither MPI nor the machine. */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "tools/doctor/doctor.h"
#include "tools/median.h"

/* --- What the facts say ------------------------------------------------------------------------*/

const struct doctor_interface *doctor_interface_in(const struct doctor_facts *facts, int host,
                                                   int subnet) {
  const struct doctor_host *the = &facts->hosts[host];
  const struct doctor_subnet *in = &facts->subnets[subnet];
  for (int i = 0; i < the->interface_count; i++) {
    const struct doctor_interface *one = &the->interfaces[i];
    if (one->up && one->netmask == in->netmask && (one->address & in->netmask) == in->network)
      return one;
  }
  return NULL;
}

/* True if every host has an address in the candidate's subnet, each another one. */
static bool is_shared(const struct doctor_facts *facts, int candidate) {
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *mine = doctor_interface_in(facts, h, candidate);
    for (int other = 0; mine && other < h; other++)
      if (doctor_interface_in(facts, other, candidate)->address == mine->address)
        return false;
    if (!mine)
      return false;
  }
  return true;
}

void doctor_find_subnets(struct doctor_facts *facts) {
  const struct doctor_host *first = &facts->hosts[0];
  facts->subnet_count = 0;
  for (int i = 0; i < first->interface_count && facts->subnet_count < DOCTOR_SUBNETS; i++) {
    const struct doctor_interface *one = &first->interfaces[i];
    facts->subnets[facts->subnet_count] =
        (struct doctor_subnet){.network = one->address & one->netmask, .netmask = one->netmask};
    facts->subnet_count += doctor_interface_in(facts, 0, facts->subnet_count) == one &&
                           is_shared(facts, facts->subnet_count);
  }
}

double doctor_part_of(const struct doctor_facts *facts, int host, int subnet) {
  double there = 0, all = 0;
  for (int h = 0; h < facts->host_count; h++) {
    uint64_t sent = 0;
    for (int i = 0; i < facts->hosts[h].interface_count; i++)
      sent += facts->hosts[h].interfaces[i].sent;
    if (facts->bulk == 0 || sent < facts->bulk / 2 || (host >= 0 && host != h))
      continue; /* what else is sent is a trickle */
    all += (double)sent;
    there += (double)doctor_interface_in(facts, h, subnet)->sent;
  }
  return all > 0 ? there / all : 0;
}

int doctor_used_subnet(const struct doctor_facts *facts) {
  int best = -1;
  double most = 0;
  for (int s = 0; s < facts->subnet_count; s++)
    if (doctor_part_of(facts, -1, s) > most) {
      most = doctor_part_of(facts, -1, s);
      best = s;
    }
  return best;
}

static int count_cpus(const uint64_t *cpus) {
  int count = 0;
  for (int word = 0; word < DOCTOR_CPU_TEXT; word++)
    count += __builtin_popcountll(cpus[word]);
  return count;
}

int doctor_host_cpus(const struct doctor_facts *facts, int host) {
  uint64_t all[DOCTOR_CPU_TEXT] = {0};
  for (int r = 0; r < facts->rank_count; r++)
    for (int word = 0; facts->ranks[r].host == host && word < DOCTOR_CPU_TEXT; word++)
      all[word] |= facts->ranks[r].cpus[word];
  return count_cpus(all);
}

/* The better of the two middle values: when half of the hosts are slow, they are the fault, and
 * when two numbers differ, the spread of the good half is the noise. */
static double find_good_median(double *values, int count, bool low_is_bad) {
  tool_median(values, count); /* sorts them */
  return values[low_is_bad ? count / 2 : (count - 1) / 2];
}

/* A normal distribution's standard deviation is 1.4826 median absolute deviations; four of them are
 * beyond noise for any number of hosts that a table shows. */
bool doctor_outlier(double value, const double *values, int count, double ratio, bool low_is_bad) {
  double *copy = malloc((size_t)(count + 1) * sizeof *copy);
  int used = 0;
  bool far = false;
  for (int i = 0; copy && i < count; i++)
    if (values[i] > 0)
      copy[used++] = values[i];
  if (used >= 3 && value > 0) {
    double median = find_good_median(copy, used, low_is_bad);
    for (int i = 0; i < used; i++)
      copy[i] = fabs(copy[i] - median);
    double noise = 4 * 1.4826 * find_good_median(copy, used, false);
    far = low_is_bad ? value * ratio <= median && median - value > noise
                     : value >= median * ratio && value - median > noise;
  }
  free(copy);
  return far;
}

/* --- Findings ----------------------------------------------------------------------------------*/

__attribute__((format(printf, 6, 7))) static void add(struct doctor_diagnosis *diagnosis,
                                                      enum doctor_kind kind, int host,
                                                      const char *why, const char *advice,
                                                      const char *format, ...) {
  va_list arguments;
  if (diagnosis->count == DOCTOR_MAX_FINDINGS) {
    diagnosis->more++;
    return;
  }
  struct doctor_finding *finding = &diagnosis->findings[diagnosis->count++];
  *finding = (struct doctor_finding){.kind = kind, .host = host, .why = why, .advice = advice};
  va_start(arguments, format);
  vsnprintf(finding->seen, sizeof finding->seen, format, arguments);
  va_end(arguments);
}

/* A scheduler's time slice is a few milliseconds: 4,000 to 9,000 us a hop among twice as many ranks
 * as processors, where 6 us are measured when they yield. Other programs on the same processors add
 * some hundreds, so that less counts only where the cause is plain. */
#define STARVED_MICROSECONDS 2000.0
#define CROWDED_MICROSECONDS 300.0

static void judge_waiting(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  const struct doctor_host *worst = facts->hosts;
  for (int h = 1; h < facts->host_count; h++)
    if (facts->hosts[h].local_hop > worst->local_hop)
      worst = &facts->hosts[h];
  const int at = (int)(worst - facts->hosts), cpus = doctor_host_cpus(facts, at);
  const bool off = facts->ranks[0].yields == 0; /* the launcher gives all ranks the same */
  const bool inside = worst->local_hop >=
                      (off && worst->ranks > cpus ? CROWDED_MICROSECONDS : STARVED_MICROSECONDS);
  if (!inside && (facts->hop_all < STARVED_MICROSECONDS || facts->hop_all < 4 * facts->hop_two))
    return;
  add(diagnosis, DOCTOR_SPINNING, inside ? at : -1,
      "ranks that wait keep the processors from those that have work",
      off ? "mpi_yield_when_idle 1, or no more ranks than processors"
          : "no more ranks than processors; see what else runs on the hosts",
      "a message that goes round the %s takes %.0f us a hop; %d ranks on %d CPUs of %s%s",
      inside ? "ranks of a host" : "hosts", inside ? worst->local_hop : facts->hop_all,
      worst->ranks, cpus, worst->name, off ? ", mpi_yield_when_idle is off" : "");
  diagnosis->set_yield = off;
}

/* Judges ranks that share CPUs although the host has others that they were not given. One finding:
 * the launcher does the same on every host. */
static void judge_binding(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  for (int r = 0; r < facts->rank_count && !diagnosis->set_binding; r++) {
    const struct doctor_rank *mine = &facts->ranks[r];
    const struct doctor_host *host = &facts->hosts[mine->host];
    int cpus = count_cpus(mine->cpus), alike = 0;
    for (int k = 0; k < facts->rank_count; k++)
      alike += facts->ranks[k].host == mine->host &&
               memcmp(facts->ranks[k].cpus, mine->cpus, sizeof mine->cpus) == 0;
    if (alike <= cpus || cpus >= host->cpus_online || cpus == 0)
      continue;
    add(diagnosis, DOCTOR_SAME_CPU, mine->host, "they take turns on it while other CPUs are idle",
        "do not bind, or bind every rank to a core of its own",
        "%s: %d ranks, of which rank %d is one, are bound to the same %d of %d CPUs", host->name,
        alike, r, cpus, host->cpus_online);
    diagnosis->set_binding = true;
  }
}

/* --- Interfaces --------------------------------------------------------------------------------*/

/* The ratio by which another subnet must be faster: gigabit and 2.5 Gbit/s are further apart, the
 * runs of one and the same link are not. Subnets with less than USED_PART of the traffic are not
 * used. Plain TCP stays above LINK_PART of a link's speed; 25 Gbit/s are beyond what one process
 * can fill. */
#define FASTER_RATIO 1.6
#define USED_PART    0.1
#define LINK_PART    0.6
enum { MAX_LINK = 25000 };

static const char *name_in(const struct doctor_facts *facts, int subnet) {
  return doctor_interface_in(facts, 0, subnet)->name;
}

static bool is_faster(const struct doctor_facts *facts, int fast, int slow) {
  double rate = facts->subnets[slow].one_stream;
  return rate > 0 && facts->subnets[fast].one_stream >= FASTER_RATIO * rate;
}

/* True if a host sends in both: Open MPI cuts long messages among all that it may use. */
static bool sends_in_both(const struct doctor_facts *facts, int subnet, int other) {
  for (int h = 0; h < facts->host_count; h++)
    if (doctor_part_of(facts, h, subnet) >= USED_PART &&
        doctor_part_of(facts, h, other) >= USED_PART)
      return true;
  return false;
}

static void judge_subnets(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                          int used, int best) {
  char networks[2][DOCTOR_ADDRESS];
  const struct doctor_subnet *slow = &facts->subnets[used], *fast = &facts->subnets[best];
  for (int s = 0; s < facts->subnet_count; s++)
    if (is_faster(facts, best, s) && sends_in_both(facts, s, best)) {
      add(diagnosis, DOCTOR_SPREAD, -1,
          "a message that is cut among both arrives when its slower part does",
          "let MPI use the faster one alone",
          "%.0f %% of MPI's traffic takes %s, where plain TCP carries %.2f Gbit/s, and %.0f %% "
          "takes %s, which carries %.2f",
          100 * doctor_part_of(facts, -1, s), name_in(facts, s), facts->subnets[s].one_stream,
          100 * doctor_part_of(facts, -1, best), name_in(facts, best), fast->one_stream);
      diagnosis->set_subnet = best;
      return;
    }
  if (!is_faster(facts, best, used))
    return;
  add(diagnosis, DOCTOR_WRONG_INTERFACE, -1, "every exchange takes as long as the slower one needs",
      "let MPI use the faster one alone",
      "MPI's traffic takes %s (%s), where plain TCP carries %.2f Gbit/s; %s (%s), which all hosts "
      "have too, carries %.2f",
      name_in(facts, used), doctor_network(slow->network, slow->netmask, networks[0]),
      slow->one_stream, name_in(facts, best),
      doctor_network(fast->network, fast->netmask, networks[1]), fast->one_stream);
  diagnosis->set_subnet = best;
}

static void judge_each_interface(const struct doctor_facts *facts,
                                 struct doctor_diagnosis *diagnosis, int used) {
  int common = 0, most = 0, speed = MAX_LINK;
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *one = doctor_interface_in(facts, h, used);
    int alike = 0;
    for (int other = 0; other < facts->host_count; other++)
      alike += doctor_interface_in(facts, other, used)->mtu == one->mtu;
    if (alike > most)
      most = alike, common = one->mtu;
    speed = !one->physical || one->speed <= 0 ? 0 : one->speed < speed ? one->speed : speed;
  }
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *one = doctor_interface_in(facts, h, used);
    if (one->mtu != common)
      add(diagnosis, DOCTOR_MTU, h, "packets larger than the other side takes are lost silently",
          "ip link set dev INTERFACE mtu MTU there, as on the others",
          "%s: MTU %d on %s, %d on %d of %d hosts", facts->hosts[h].name, one->mtu, one->name,
          common, most, facts->host_count);
    if (facts->bulk == 0 || doctor_part_of(facts, -1, used) <= 0 ||
        doctor_part_of(facts, h, used) >= USED_PART)
      continue;
    add(diagnosis, DOCTOR_ODD_INTERFACE, h,
        "its way to the others is another one, and may be a slower one",
        "name the interface, the same on every host; its routes if it is named: ip route there",
        "%s: %.0f %% of what it sends takes %s, as most hosts' does", facts->hosts[h].name,
        100 * doctor_part_of(facts, h, used), one->name);
    diagnosis->set_subnet = diagnosis->set_subnet < 0 ? used : diagnosis->set_subnet;
  }
  const struct doctor_subnet *subnet = &facts->subnets[used];
  const double best = fmax(subnet->one_stream, subnet->four_streams);
  if (best > 0 && speed < MAX_LINK && best < LINK_PART * speed * 1e-3)
    add(diagnosis, DOCTOR_LINK_SPEED, -1,
        "something between the hosts, or the hosts themselves, holds the traffic back",
        "look for errors in ethtool -S, for other traffic, for a slower switch, at MTUs",
        "plain TCP carries %.2f Gbit/s at best, but the slowest link has %.1f", best, speed * 1e-3);
}

/* --- Hosts and pairs ---------------------------------------------------------------------------*/

#define HOST_RATIO        1.6
#define PAIR_RATIO        2.0 /* pairs are many, and one of many is more often late by chance */
#define LATE_RATIO        3.0
#define LATE_MICROSECONDS 100.0 /* less is a longer cable or another switch: it costs nothing */

/* Finds each host's best values with any other: noise and a partner's faults only lower rates and
 * raise times. */
static void find_best(const struct doctor_facts *facts, double *sends, double *receives,
                      double *times) {
  const int hosts = facts->host_count;
  for (int from = 0; from < hosts; from++)
    for (int to = 0; to < hosts; to++) {
      const double rate = facts->bandwidth[from * hosts + to];
      const double time = facts->round_trip[from * hosts + to];
      sends[from] = fmax(sends[from], rate);
      receives[to] = fmax(receives[to], rate);
      if (time > 0 && (times[from] <= 0 || time < times[from]))
        times[from] = time;
    }
}

static double largest(const double *values, int count) {
  double most = 0;
  for (int i = 0; i < count; i++)
    most = fmax(most, values[i]);
  return most;
}

static void judge_host(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                       int host, const double *sends, const double *receives, const double *times) {
  const int hosts = facts->host_count;
  const bool out = doctor_outlier(sends[host], sends, hosts, HOST_RATIO, true);
  const bool in = doctor_outlier(receives[host], receives, hosts, HOST_RATIO, true);
  const double *way = out ? sends : receives;
  double best = INFINITY;
  for (int h = 0; h < hosts; h++)
    best = times[h] > 0 ? fmin(best, times[h]) : best;
  if (out || in)
    add(diagnosis, DOCTOR_SLOW_HOST, host, "every exchange waits for the slowest host",
        "its link, cable or switch port, or a limit on its rate: ethtool and tc qdisc show there",
        "%s: %.2f Gbit/s %s every other host, the others %.2f", facts->hosts[host].name, way[host],
        !in   ? "to"
        : out ? "to and from"
              : "from",
        largest(way, hosts));
  if (doctor_outlier(times[host], times, hosts, LATE_RATIO, false) &&
      times[host] >= best + LATE_MICROSECONDS)
    add(diagnosis, DOCTOR_LATE_HOST, host, "small messages wait for it",
        "its way to the others (switches, routing), power saving or load on it",
        "%s: a round trip takes %.0f us to any other host, %.0f us among others",
        facts->hosts[host].name, times[host], best);
}

/* Judges hosts and pairs. The expected rate is that of each with others; of two hosts only the
 * directions differ. */
static void judge_hosts(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  const int hosts = facts->host_count;
  double *sends = calloc(3 * (size_t)hosts, sizeof *sends);
  if (!sends)
    return;
  double *receives = sends + hosts, *times = receives + hosts;
  find_best(facts, sends, receives, times);
  for (int h = 0; h < hosts; h++)
    judge_host(facts, diagnosis, h, sends, receives, times);
  for (int pair = 0; pair < hosts * hosts; pair++) {
    const int from = pair / hosts, to = pair % hosts;
    const double expected = hosts == 2 ? largest(sends, 2) : fmin(sends[from], receives[to]);
    if (facts->bandwidth[pair] > 0 && facts->bandwidth[pair] * PAIR_RATIO <= expected)
      add(diagnosis, DOCTOR_SLOW_PAIR, from, "exchanges that use this way wait for it",
          "the way between these two: links (ethtool on both), switches, cables, routing",
          "%s to %s: %.2f Gbit/s, but %.2f Gbit/s %s", facts->hosts[from].name,
          facts->hosts[to].name, facts->bandwidth[pair], expected,
          hosts == 2 ? "the other way" : "with other hosts");
  }
  free(sends);
}

void doctor_judge(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  const int used = doctor_used_subnet(facts);
  int best = 0;
  *diagnosis = (struct doctor_diagnosis){.set_subnet = -1};
  judge_waiting(facts, diagnosis);
  const bool spinning = diagnosis->count > 0;
  judge_binding(facts, diagnosis);
  for (int s = 1; s < facts->subnet_count; s++)
    if (facts->subnets[s].one_stream > facts->subnets[best].one_stream)
      best = s;
  if (facts->host_count >= 2 && used >= 0) {
    judge_subnets(facts, diagnosis, used, best);
    judge_each_interface(facts, diagnosis, used);
  }
  if (facts->host_count < 2 || spinning)
    return; /* rates among ranks that starve each other say nothing of the network */
  judge_hosts(facts, diagnosis);
  const struct doctor_subnet *subnet = &facts->subnets[used < 0 ? 0 : used];
  if (used < 0 || subnet->one_stream <= 0 ||
      subnet->four_streams < FASTER_RATIO * subnet->one_stream)
    return;
  add(diagnosis, DOCTOR_STREAMS_HELP, -1,
      "a single connection does not fill the network: a limit of each flow, or delay",
      "several connections between two hosts; measure again, as not every release of Open MPI "
      "gains by btl_tcp_links",
      "plain TCP: %.2f Gbit/s in one stream, %.2f in four", subnet->one_stream,
      subnet->four_streams);
  diagnosis->set_streams = true;
}
