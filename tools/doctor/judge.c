/* The doctor's findings, from the facts. Knows neither MPI nor the machine. */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "tools/doctor/doctor.h"

/* --- Findings ----------------------------------------------------------------------------------*/

static void append(char *text, size_t capacity, const char *format, va_list arguments) {
  size_t used = strlen(text);
  vsnprintf(text + used, capacity - used, format, arguments);
}

__attribute__((format(printf, 2, 3))) static void see(struct doctor_finding *finding,
                                                      const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  append(finding->seen, sizeof finding->seen, format, arguments);
  va_end(arguments);
}

/* Another finding, with what to do about it; what was seen is to follow. One that nobody reads when
 * there are too many. */
__attribute__((format(printf, 5, 6))) static struct doctor_finding *add(
    struct doctor_diagnosis *diagnosis, enum doctor_kind kind, int host, const char *why,
    const char *format, ...) {
  static struct doctor_finding beyond; /* written to, never read */
  bool fits = diagnosis->count < DOCTOR_MAX_FINDINGS;
  struct doctor_finding *finding = fits ? &diagnosis->findings[diagnosis->count++] : &beyond;
  diagnosis->more += !fits;
  *finding = (struct doctor_finding){.kind = kind, .host = host};
  snprintf(finding->why, sizeof finding->why, "%s", why);
  va_list arguments;
  va_start(arguments, format);
  append(finding->set, sizeof finding->set, format, arguments);
  va_end(arguments);
  return finding;
}

static const char *plural(int count) { return count == 1 ? "" : "s"; }

/* --- How ranks wait, and where they are bound --------------------------------------------------*/

/* A scheduler's time slice is a few milliseconds: 4,000 to 9,000 us a hop among twice as many ranks
 * as processors, where 6 us are measured when they yield. Other programs on the same processors add
 * some hundreds, so that less counts only where the cause is plain. */
#define STARVED_MICROSECONDS 2000.0
#define CROWDED_MICROSECONDS 300.0
#define STARVED_RATIO        4.0

/* Of the first rank on the host; the launcher gives all ranks the same. */
static int host_yields(const struct doctor_facts *facts, int host) {
  for (int rank = 0; rank < facts->rank_count; rank++)
    if (facts->ranks[rank].host == host)
      return facts->ranks[rank].yields;
  return -1;
}

static void add_spinning(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                         int host, double hop) {
  int at = host < 0 ? 0 : host, ranks = facts->hosts[at].ranks, cpus = doctor_host_cpus(facts, at);
  bool off = host_yields(facts, at) == 0;
  struct doctor_finding *finding =
      add(diagnosis, DOCTOR_SPINNING, host,
          "ranks that wait keep the processors from those that have work", "%s",
          off ? "mpi_yield_when_idle 1, or no more ranks than processors"
              : "no more ranks than processors; see what else runs on the hosts");
  see(finding, "a message that goes round %s takes %.0f us a hop",
      host < 0 ? "the hosts" : "the ranks of a host", hop);
  if (host < 0)
    see(finding, ", between two of them while all others sleep %.0f", facts->hop_two);
  see(finding, "; %d rank%s on %d CPU%s of %s%s", ranks, plural(ranks), cpus, plural(cpus),
      facts->hosts[at].name, off ? ", mpi_yield_when_idle is off" : "");
  diagnosis->set_yield |= off;
}

static void judge_waiting(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  int worst = 0;
  for (int h = 1; h < facts->host_count; h++)
    if (facts->hosts[h].local_hop > facts->hosts[worst].local_hop)
      worst = h;
  bool plain =
      host_yields(facts, worst) == 0 && facts->hosts[worst].ranks > doctor_host_cpus(facts, worst);
  double hop = facts->hosts[worst].local_hop;
  if (hop >= (plain ? CROWDED_MICROSECONDS : STARVED_MICROSECONDS))
    add_spinning(facts, diagnosis, worst, hop);
  else if (facts->hop_all >= STARVED_MICROSECONDS &&
           facts->hop_all >= STARVED_RATIO * facts->hop_two)
    add_spinning(facts, diagnosis, -1, facts->hop_all);
}

/* How many ranks of the host have exactly this rank's CPUs. */
static int ranks_alike(const struct doctor_facts *facts, const struct doctor_rank *mine) {
  int alike = 0;
  for (int r = 0; r < facts->rank_count; r++)
    alike += facts->ranks[r].host == mine->host &&
             memcmp(facts->ranks[r].cpus, mine->cpus, sizeof mine->cpus) == 0;
  return alike;
}

static int first_cpu(const uint64_t *cpus) {
  int word = 0;
  while (!cpus[word])
    word++;
  return 64 * word + __builtin_ctzll(cpus[word]);
}

/* Ranks that share CPUs although the host has others that they were not given. One finding: the
 * launcher does the same on every host. */
static void judge_binding(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  for (int r = 0; r < facts->rank_count && !diagnosis->set_binding; r++) {
    const struct doctor_rank *rank = &facts->ranks[r];
    const struct doctor_host *host = &facts->hosts[rank->host];
    int cpus = doctor_cpu_count(rank->cpus), alike = ranks_alike(facts, rank);
    if (alike <= cpus || cpus >= host->cpus_online || cpus == 0)
      continue;
    see(add(diagnosis, DOCTOR_SAME_CPU, rank->host,
            "they take turns on it while other CPUs are idle",
            "do not bind, or bind every rank to a core of its own"),
        "%s: %d ranks, of which rank %d is one, are bound to %s %d%s; the host has %d", host->name,
        alike, r, cpus == 1 ? "CPU" : "the same CPUs from", first_cpu(rank->cpus),
        cpus == 1 ? "" : " on", host->cpus_online);
    diagnosis->set_binding = true;
  }
}

/* --- Interfaces --------------------------------------------------------------------------------*/

/* By how much another subnet must be faster. Gigabit and 2.5 Gbit/s are further apart, the runs of
 * one and the same link are not. */
#define INTERFACE_RATIO 1.6
/* What takes less than this part of the traffic is not used. */
#define SPREAD_PART 0.1

static const char *name_in(const struct doctor_facts *facts, int subnet) {
  return doctor_interface_in(facts, 0, subnet)->name;
}

/* Whether MPI uses `slow` although `fast`, another subnet, is so much faster. */
static bool is_faster(const struct doctor_facts *facts, int fast, int slow) {
  double rate = facts->subnets[slow].rate[0];
  return fast != slow && rate > 0 && facts->subnets[fast].rate[0] >= INTERFACE_RATIO * rate;
}

static void add_wrong(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                      int used, int best) {
  const struct doctor_subnet *slow = &facts->subnets[used], *fast = &facts->subnets[best];
  char slow_network[DOCTOR_ADDRESS], fast_network[DOCTOR_ADDRESS];
  struct doctor_finding *finding =
      add(diagnosis, DOCTOR_WRONG_INTERFACE, -1, "", "let MPI use %s alone", name_in(facts, best));
  snprintf(finding->why, sizeof finding->why, "every exchange could be %.1f times as fast",
           fast->rate[0] / slow->rate[0]);
  see(finding,
      "MPI's traffic takes %s (%s), where plain TCP carries %.2f Gbit/s; %s (%s), which all hosts "
      "have too, carries %.2f",
      name_in(facts, used), doctor_network(slow, slow_network), slow->rate[0], name_in(facts, best),
      doctor_network(fast, fast_network), fast->rate[0]);
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
  int slow = 0;
  while (slow < facts->subnet_count &&
         !(is_faster(facts, best, slow) && sends_in_both(facts, slow, best)))
    slow++;
  if (slow == facts->subnet_count)
    return false;
  see(add(diagnosis, DOCTOR_SPREAD, -1,
          "a message that is cut among both arrives when its slower part does",
          "let MPI use %s alone", name_in(facts, best)),
      "%.0f %% of MPI's traffic takes %s, where plain TCP carries %.2f Gbit/s, and %.0f %% takes "
      "%s, which carries %.2f",
      100 * doctor_part_of(facts, -1, slow), name_in(facts, slow), facts->subnets[slow].rate[0],
      100 * doctor_part_of(facts, -1, best), name_in(facts, best), facts->subnets[best].rate[0]);
  diagnosis->set_subnet = best;
  return true;
}

static void judge_odd(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                      int used) {
  for (int h = 0; h < facts->host_count; h++) {
    double part;
    char network[DOCTOR_ADDRESS], address[DOCTOR_ADDRESS];
    const struct doctor_interface *carrier = doctor_carrier(facts, h, &part);
    const struct doctor_interface *common = doctor_interface_in(facts, h, used);
    if (!carrier || (double)common->sent >= SPREAD_PART * (double)carrier->sent)
      continue;
    see(add(diagnosis, DOCTOR_ODD_INTERFACE, h,
            "its way to the others is another one, and may be a slower one",
            "name the interface, the same on every host; its routes if it is named: ip route "
            "there"),
        "%s: %.0f %% of what it sends takes %s (%s); most hosts send in %s, which it has as %s",
        facts->hosts[h].name, 100 * part, carrier->name, doctor_address(carrier->address, address),
        doctor_network(&facts->subnets[used], network), common->name);
    if (diagnosis->set_subnet < 0)
      diagnosis->set_subnet = used;
  }
}

/* Devices whose link runs at a speed that plain TCP stays far below; 25 Gbit/s and more are beyond
 * what one process can be asked to fill. */
#define LINK_PART 0.6
enum { MAX_LINK = 25000 };

static void judge_link(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                       int used) {
  int speed = MAX_LINK, mtu = 0;
  double best = 0;
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *interface = doctor_interface_in(facts, h, used);
    if (!interface->physical || interface->speed <= 0 || interface->speed > MAX_LINK)
      return;
    speed = interface->speed < speed ? interface->speed : speed;
    mtu = interface->mtu;
  }
  for (int i = 0; i < DOCTOR_RATES; i++)
    best = fmax(best, facts->subnets[used].rate[i]);
  if (best > 0 && best < LINK_PART * speed * 1e-3)
    see(add(diagnosis, DOCTOR_LINK_SPEED, -1,
            "something between the hosts, or the hosts themselves, holds the traffic back",
            "look for errors in ethtool -S, for other traffic, for a slower switch%s",
            speed >= 10000 && mtu <= 1500 ? "; MTU 9000 on hosts and switch, if processors are busy"
                                          : ""),
        "plain TCP carries %.2f Gbit/s at best, the slowest link says %.1f", best, speed * 1e-3);
}

static void judge_interfaces(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  int used = doctor_used_subnet(facts), best = 0;
  if (used < 0)
    return;
  for (int s = 1; s < facts->subnet_count; s++)
    if (facts->subnets[s].rate[0] > facts->subnets[best].rate[0])
      best = s;
  if (!judge_spread(facts, diagnosis, best) && is_faster(facts, best, used))
    add_wrong(facts, diagnosis, used, best);
  judge_odd(facts, diagnosis, used);
  judge_link(facts, diagnosis, used);
}

/* --- Hosts and pairs ---------------------------------------------------------------------------*/

#define HOST_RATIO        1.6
#define PAIR_RATIO        2.0 /* pairs are many, and one of many is more often late by chance */
#define LATE_RATIO        3.0
#define LATE_MICROSECONDS 100.0 /* less is a longer cable or another switch: it costs nothing */

/* What a host reaches with the others: noise and a partner's faults only make rates less, and
 * times longer. */
struct best {
  double sends, receives, round_trip;
};

static struct best best_of(const struct doctor_facts *facts, int host) {
  struct best best = {0};
  int hosts = facts->host_count;
  for (int other = 0; other < hosts; other++) {
    double time = facts->round_trip[host * hosts + other];
    best.sends = fmax(best.sends, facts->bandwidth[host * hosts + other]);
    best.receives = fmax(best.receives, facts->bandwidth[other * hosts + host]);
    if (time > 0 && (best.round_trip <= 0 || time < best.round_trip))
      best.round_trip = time;
  }
  return best;
}

static void add_slow_host(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                          int host, const char *way, double rate, double others) {
  double part;
  const struct doctor_interface *carrier = doctor_carrier(facts, host, &part);
  const char *name = carrier ? carrier->name : "IFACE";
  struct doctor_finding *finding =
      add(diagnosis, DOCTOR_SLOW_HOST, host, "every exchange waits for the slowest host",
          "its link, cable or switch port, or a limit on its rate: ethtool %s and tc qdisc show "
          "dev %s there",
          name, name);
  see(finding, "%s: %.2f Gbit/s %s every other host, the others %.2f", facts->hosts[host].name,
      rate, way, others);
  if (carrier && carrier->physical && carrier->speed > 0)
    see(finding, "; its link says %.1f", carrier->speed * 1e-3);
}

static double largest(const double *values, int count) {
  double most = 0;
  for (int i = 0; i < count; i++)
    most = fmax(most, values[i]);
  return most;
}

static void judge_slow_hosts(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                             const double *sends, const double *receives) {
  int hosts = facts->host_count;
  for (int h = 0; h < hosts; h++) {
    bool out = doctor_outlier(sends[h], sends, hosts, HOST_RATIO, true);
    bool in = doctor_outlier(receives[h], receives, hosts, HOST_RATIO, true);
    if (out || in)
      add_slow_host(facts, diagnosis, h,
                    !in   ? "to"
                    : out ? "to and from"
                          : "from",
                    out ? sends[h] : receives[h], largest(out ? sends : receives, hosts));
  }
}

static void judge_late_hosts(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                             const double *times) {
  double best = 0;
  for (int h = 0; h < facts->host_count; h++)
    if (times[h] > 0 && (best <= 0 || times[h] < best))
      best = times[h];
  for (int h = 0; h < facts->host_count; h++)
    if (doctor_outlier(times[h], times, facts->host_count, LATE_RATIO, false) &&
        times[h] >= best + LATE_MICROSECONDS)
      see(add(diagnosis, DOCTOR_LATE_HOST, h, "small messages wait for it",
              "its way to the others (switches, routing), power saving or load on it"),
          "%s: a round trip takes %.0f us to any other host, %.0f us among others",
          facts->hosts[h].name, times[h], best);
}

/* Expected is what each reaches with others; of two hosts only the ways differ. */
static void judge_pairs(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                        const double *sends, const double *receives) {
  int hosts = facts->host_count;
  bool two = hosts == 2;
  for (int from = 0; from < hosts; from++)
    for (int to = 0; to < hosts; to++) {
      double rate = facts->bandwidth[from * hosts + to];
      double expected = two ? largest(sends, 2) : fmin(sends[from], receives[to]);
      if (rate > 0 && rate * PAIR_RATIO <= expected)
        see(add(diagnosis, DOCTOR_SLOW_PAIR, from, "exchanges that use this way wait for it", "%s",
                two ? "the sender's or the receiver's link: ethtool on both"
                    : "the way between these two: switches, cables, routing"),
            "%s to %s: %.2f Gbit/s, where %.2f is what %s", facts->hosts[from].name,
            facts->hosts[to].name, rate, expected,
            two ? "the other way carries" : "each reaches with other hosts");
    }
}

static void judge_hosts(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  int hosts = facts->host_count;
  double *sends = calloc(3 * (size_t)hosts, sizeof *sends);
  double *receives = sends + hosts, *times = receives + hosts;
  if (!sends)
    return;
  for (int h = 0; h < hosts; h++) {
    struct best best = best_of(facts, h);
    sends[h] = best.sends;
    receives[h] = best.receives;
    times[h] = best.round_trip;
  }
  judge_slow_hosts(facts, diagnosis, sends, receives);
  judge_late_hosts(facts, diagnosis, times);
  judge_pairs(facts, diagnosis, sends, receives);
  free(sends);
}

/* --- Streams, MTU ------------------------------------------------------------------------------*/

#define STREAMS_RATIO 1.6

static void judge_streams(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  int used = doctor_used_subnet(facts);
  const double *rate = used >= 0 ? facts->subnets[used].rate : NULL;
  bool plain = rate && rate[0] > 0 && rate[DOCTOR_RATES - 1] >= STREAMS_RATIO * rate[0];
  bool message = facts->one_stream > 0 && facts->many_streams >= STREAMS_RATIO * facts->one_stream;
  if (!plain && !message)
    return;
  struct doctor_finding *finding =
      add(diagnosis, DOCTOR_STREAMS_HELP, -1,
          "a single connection does not fill the network: a limit of each flow, or delay",
          "several connections between two hosts; measure again, as not every release of Open MPI "
          "gains by btl_tcp_links");
  if (plain)
    see(finding, "plain TCP: %.2f Gbit/s in one stream, %.2f in four%s", rate[0],
        rate[DOCTOR_RATES - 1], message ? "; " : "");
  if (message)
    see(finding, "MPI: %.2f Gbit/s from one rank, %.2f from %d ranks at once", facts->one_stream,
        facts->many_streams, facts->message_streams);
  diagnosis->set_streams = DOCTOR_STREAMS;
}

/* How many hosts have that MTU on the subnet. */
static int hosts_with(const struct doctor_facts *facts, int subnet, int mtu) {
  int alike = 0;
  for (int h = 0; h < facts->host_count; h++)
    alike += doctor_interface_in(facts, h, subnet)->mtu == mtu;
  return alike;
}

static void judge_mtu(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  int used = doctor_used_subnet(facts), common = 0, most = 0;
  for (int h = 0; used >= 0 && h < facts->host_count; h++) {
    int mtu = doctor_interface_in(facts, h, used)->mtu, alike = hosts_with(facts, used, mtu);
    if (alike > most) {
      most = alike;
      common = mtu;
    }
  }
  for (int h = 0; used >= 0 && h < facts->host_count; h++) {
    const struct doctor_interface *interface = doctor_interface_in(facts, h, used);
    if (interface->mtu != common)
      see(add(diagnosis, DOCTOR_MTU, h,
              "packets larger than the other side takes are lost without a word where nothing on "
              "the way says so",
              "on %s: ip link set dev %s mtu %d", facts->hosts[h].name, interface->name, common),
          "%s: MTU %d on %s, %d on %d of %d hosts", facts->hosts[h].name, interface->mtu,
          interface->name, common, most, facts->host_count);
  }
}

void doctor_judge(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  memset(diagnosis, 0, sizeof *diagnosis);
  diagnosis->set_subnet = -1;
  judge_waiting(facts, diagnosis);
  bool spinning = diagnosis->count > 0;
  judge_binding(facts, diagnosis);
  if (facts->host_count < 2)
    return;
  judge_interfaces(facts, diagnosis);
  if (!spinning) { /* rates among ranks that starve each other say nothing of the network */
    judge_hosts(facts, diagnosis);
    judge_streams(facts, diagnosis);
  }
  judge_mtu(facts, diagnosis);
}
