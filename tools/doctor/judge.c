/* Derives the doctor's findings from the facts by a table of rules. Needs neither MPI nor the
 * network. */
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "tools/doctor/doctor.h"
#include "tools/tune/tune.h"

/* --- The input and output of a rule ------------------------------------------------------------*/

struct question {
  const struct doctor_facts *facts;
  int used;                           /* the subnet that carries most of the traffic; -1: none */
  int mtu;                            /* the most frequent MTU in that subnet */
  double *sends, *receives;           /* best rate of each host; last entry: best of all hosts */
  int host, other;                    /* the host to judge; by `over`: interface, subnet, host */
  const struct doctor_host *the;      /* the host */
  const struct doctor_interface *one; /* the host's interface: `other`, or in the used subnet */
  double bound;
  char seen[DOCTOR_SEEN]; /* the finding's first line */
  bool of_all;            /* the finding names no host */
};

/* A rule describes a measured value in at->seen, and returns whether the value is a finding. */
typedef bool rule(struct question *at);

static void __attribute__((format(printf, 2, 3)))
describe(struct question *at, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(at->seen, sizeof at->seen, format, arguments);
  va_end(arguments);
}

/* --- Processors, and the accuracy of times -----------------------------------------------------*/

static bool is_busy(const struct doctor_host *host, double bound) {
  return host->others >= bound && host->others + host->ranks > host->usable;
}

/* Emulated hosts are all on one machine, and all busy: the finding then names no host. */
static bool judge_busy(struct question *at) {
  const struct doctor_host *the = at->the;
  int busy = 0;
  for (int h = 0; h < at->facts->host_count; h++)
    busy += is_busy(&at->facts->hosts[h], at->bound);
  at->of_all = busy > 1;
  describe(at, "%s: other programs use %.1f of the %d CPUs of %d rank%s%s", the->name, the->others,
           the->usable, TUNE_COUNTED(the->ranks), busy > 1 ? ", and so on other hosts" : "");
  return is_busy(the, at->bound);
}

static bool judge_stolen(struct question *at) {
  const struct doctor_host *the = at->the;
  describe(
      at,
      "%s: the hypervisor took %.0f %% of the time, and a limit of its container stopped it %d "
      "times",
      the->name, 100 * the->stolen, the->lost_periods);
  return the->stolen >= at->bound || the->lost_periods >= 2; /* a single stop may be chance */
}

/* A scheduler's time slice is a few milliseconds. With twice as many ranks as processors a hop
 * takes 4,000 to 9,000 us, but 6 us if idle ranks yield. A time below 300 us is a finding only if
 * the cause is known. */
#define CROWDED_MICROSECONDS 300.0

static bool judge_waiting(struct question *at) {
  const struct doctor_host *the = at->the;
  const bool off = at->facts->yields == 0, crowded = off && the->ranks > the->usable;
  describe(at,
           "a message that goes round the ranks of a host takes %.0f us a hop; %d ranks on %d CPUs "
           "of %s%s",
           the->local_hop, the->ranks, the->usable, the->name,
           off ? ", mpi_yield_when_idle is off" : "");
  return the->local_hop >= (crowded ? CROWDED_MICROSECONDS : at->bound);
}

/* True if ranks share CPUs although the host has more CPUs. */
static bool judge_binding(struct question *at) {
  const struct doctor_host *the = at->the;
  describe(at, "%s: %d ranks are bound to the same %d of %d CPUs", the->name, the->ranks,
           the->usable, the->cpus_online);
  return the->usable > 0 && the->ranks > the->usable && the->usable < the->cpus_online;
}

/* --- Interfaces: facts of the kernel, which no load can change ---------------------------------*/

/* Returns the number of other hosts' interfaces that are up in the subnet of this interface. With
 * `address`, counts only those with the same address. */
static int count_similar_interfaces(const struct question *at, bool address) {
  int count = 0;
  for (int h = 0; h < at->facts->host_count; h++)
    for (int i = 0; h != at->host && i < at->facts->hosts[h].interface_count; i++) {
      const struct doctor_interface *one = &at->facts->hosts[h].interfaces[i];
      count += one->up && doctor_is_in_network(one, at->one->address, at->one->netmask) &&
               (!address || one->address == at->one->address);
    }
  return count;
}

static bool judge_down(struct question *at) {
  const int up = count_similar_interfaces(at, false);
  describe(at, "%s: %s is down; on %d other host%s it is up", at->the->name, at->one->name,
           TUNE_COUNTED(up));
  return !at->one->up && up > 0;
}

/* Returns the speed of the slowest or the fastest link of the used subnet, in Mbit/s. An unknown
 * speed counts as 0. */
static int find_speed(const struct question *at, bool slowest) {
  int speed = slowest ? INT_MAX : 0;
  for (int h = 0; h < at->facts->host_count; h++) {
    const struct doctor_interface *one = doctor_find_interface(at->facts, h, at->used);
    const int its = one->physical && one->speed > 0 ? one->speed : 0;
    speed = (slowest ? its < speed : its > speed) ? its : speed;
  }
  return speed;
}

static bool judge_speed(struct question *at) {
  const int fastest = find_speed(at, false);
  describe(at, "%s: the link of %s runs at %d Mbit/s, those of others at %d", at->the->name,
           at->one->name, at->one->speed, fastest);
  return at->one->physical && at->one->speed > 0 && at->one->speed < fastest;
}

static bool judge_duplex(struct question *at) {
  describe(at, "%s: %s has half duplex, at %d Mbit/s", at->the->name, at->one->name,
           at->one->speed);
  return at->one->up && at->one->half_duplex;
}

static int count_mtu(const struct question *at, int mtu) {
  int count = 0;
  for (int h = 0; h < at->facts->host_count; h++)
    count += doctor_find_interface(at->facts, h, at->used)->mtu == mtu;
  return count;
}

static bool judge_mtu(struct question *at) {
  describe(at, "%s: MTU %d on %s, %d on %d of %d hosts", at->the->name, at->one->mtu, at->one->name,
           at->mtu, count_mtu(at, at->mtu), at->facts->host_count);
  return at->one->mtu != at->mtu;
}

/* Finds an address that other hosts have too. */
static bool judge_bridge(struct question *at) {
  const int like = count_similar_interfaces(at, true);
  describe(at, "%s: %s has an address that %d other host%s too", at->the->name, at->one->name, like,
           like == 1 ? " has" : "s have");
  return at->one->up && !at->one->physical && like > 0;
}

/* --- Subnets and plain TCP ---------------------------------------------------------------------*/

/* A subnet with less than this part of the traffic counts as unused. */
#define USED_PART 0.1

static bool judge_interface_choice(struct question *at) {
  const double part = doctor_traffic_part(at->facts, at->host, at->used);
  describe(at, "%s: only %.0f %% of what it sends takes %s, the interface of most hosts' traffic",
           at->the->name, 100 * part, at->one->name);
  return part < at->bound;
}

/* True if a host sends in both subnets. Open MPI splits long messages among all interfaces that it
 * may use. */
static bool sends_in_both(const struct doctor_facts *facts, int subnet, int other) {
  for (int h = 0; h < facts->host_count; h++)
    if (doctor_traffic_part(facts, h, subnet) >= USED_PART &&
        doctor_traffic_part(facts, h, other) >= USED_PART)
      return true;
  return false;
}

/* Finds a subnet that is faster than another one that carries some of the traffic. */
static bool judge_subnet(struct question *at) {
  const int best = doctor_fastest_subnet(at->facts);
  const struct doctor_subnet *slow = &at->facts->subnets[at->other];
  const struct doctor_subnet *fast = &at->facts->subnets[best];
  char network[2][DOCTOR_ADDRESS];
  describe(at,
           "%.0f %% of MPI's traffic takes %s (%s), where plain TCP carries %.2f Gbit/s; %s (%s), "
           "which all hosts have too, carries %.2f",
           100 * doctor_traffic_part(at->facts, -1, at->other),
           doctor_find_interface(at->facts, 0, at->other)->name,
           doctor_format_network(slow->network, slow->netmask, network[0]), slow->tcp,
           doctor_find_interface(at->facts, 0, best)->name,
           doctor_format_network(fast->network, fast->netmask, network[1]), fast->tcp);
  return slow->tcp > 0 && fast->tcp >= at->bound * slow->tcp &&
         (at->other == at->used || sends_in_both(at->facts, at->other, best));
}

/* The largest link speed that is judged, in Gbit/s: one process cannot fill a faster link. */
#define MAX_LINK 25.0

/* Compares the rates of MPI and of plain TCP, from this host's partner to this host. */
static bool judge_mpi(struct question *at) {
  const int from = at->host ^ 1; /* a last host without a partner has no rate */
  const double tcp = at->the->tcp[at->used];
  const double mpi = tcp > 0 ? at->facts->bandwidth[from * at->facts->host_count + at->host] : 0;
  describe(at, "%s to %s: MPI carries %.2f Gbit/s, plain TCP %.2f between the same two by %s",
           mpi > 0 ? at->facts->hosts[from].name : "", at->the->name, mpi, tcp, at->one->name);
  return mpi > 0 && tcp < MAX_LINK && tcp >= at->bound * mpi;
}

static bool judge_firewall(struct question *at) {
  describe(at, "MPI works, but no plain TCP connection is made by %s", at->one->name);
  return at->facts->subnets[at->used].tcp <= 0;
}

static bool judge_link(struct question *at) {
  const double tcp = at->facts->subnets[at->used].tcp, slowest = find_speed(at, true) * 1e-3;
  describe(at, "plain TCP carries %.2f Gbit/s at best, but the slowest link has %.1f", tcp,
           slowest);
  return tcp > 0 && slowest < MAX_LINK && tcp < at->bound * slowest;
}

/* --- Hosts and pairs ---------------------------------------------------------------------------*/

/* True if a rate is lower than the other rates by the ratio, and by more than noise. Noise is four
 * standard deviations, of 1.4826 median absolute deviations each. Of the two middle values the
 * better one is taken as the median, so that slow hosts are reported even if half of the hosts are
 * slow. A rate of 0 was not measured. Among fewer than three rates there is no outlier. */
bool doctor_is_outlier(double value, const double *values, int count, double ratio) {
  double *copy = malloc((size_t)(count + 1) * sizeof *copy);
  int used = 0;
  bool low = false;
  for (int i = 0; copy && i < count; i++)
    if (values[i] > 0)
      copy[used++] = values[i];
  if (used >= 3 && value > 0) {
    tune_median(copy, used); /* sorts them */
    const double median = copy[used / 2];
    for (int i = 0; i < used; i++)
      copy[i] = fabs(copy[i] - median);
    tune_median(copy, used);
    low = value * ratio <= median && median - value > 4 * 1.4826 * copy[(used - 1) / 2];
  }
  free(copy);
  return low;
}

static void find_best_rates(struct question *at) {
  const int hosts = at->facts->host_count;
  for (int pair = 0; pair < 2 * hosts * hosts; pair++) { /* the second half finds the best of all */
    const double rate = at->facts->bandwidth[pair / 2];
    double *sends = &at->sends[pair % 2 ? hosts : pair / 2 / hosts];
    double *receives = &at->receives[pair % 2 ? hosts : pair / 2 % hosts];
    *sends = fmax(*sends, rate);
    *receives = fmax(*receives, rate);
  }
}

static bool judge_slow_host(struct question *at) {
  const int hosts = at->facts->host_count;
  const bool out = doctor_is_outlier(at->sends[at->host], at->sends, hosts, at->bound);
  const bool in = doctor_is_outlier(at->receives[at->host], at->receives, hosts, at->bound);
  const double *way = out ? at->sends : at->receives;
  describe(at, "%s: %.2f Gbit/s %s every other host, the others %.2f", at->the->name, way[at->host],
           !in   ? "to"
           : out ? "to and from"
                 : "from",
           way[hosts]);
  return out || in;
}

/* Compares the rate of a pair with the rates of both hosts with other hosts. If there are only two
 * hosts, compares it with the rate of the other direction. */
static bool judge_pair(struct question *at) {
  const int hosts = at->facts->host_count;
  const double rate = at->facts->bandwidth[at->host * hosts + at->other];
  const double expected =
      hosts == 2 ? at->sends[hosts] : fmin(at->sends[at->host], at->receives[at->other]);
  describe(at, "%s to %s: %.2f Gbit/s, but %.2f Gbit/s %s", at->the->name,
           at->facts->hosts[at->other].name, rate, expected,
           hosts == 2 ? "the other way" : "with other hosts");
  return rate > 0 && rate * at->bound <= expected;
}

/* --- Faults that MPI tolerates -----------------------------------------------------------------*/

static bool judge_loopback_name(struct question *at) {
  describe(at, "%s: /etc/hosts gives its own name the address %s", at->the->name,
           at->the->loopback);
  return at->the->loopback[0];
}

/* Finds a clock that differs from the clocks of most hosts. If half of the clocks differ, host 0's
 * clock is taken as right. */
static bool judge_clock(struct question *at) {
  const int count = at->facts->host_count;
  int apart = 0;
  for (int h = 0; h < count; h++) {
    const double by = at->the->clock - at->facts->hosts[h].clock;
    if (fabs(by) < at->bound)
      continue;
    apart++;
    describe(at, "%s: its clock differs from the others' by %.1f s", at->the->name, by);
  }
  return 2 * apart > count || (2 * apart == count && fabs(at->the->clock) >= at->bound);
}

/* --- The table of rules, and its application ---------------------------------------------------*/

/* `over` says to what a rule is applied. `when` has flags. SEVERAL: the rule needs several hosts;
 * USED: a subnet that is used; TIMES: accurate times. After a finding of a BLURS rule times are
 * inaccurate, and the bounds of COARSE rules are multiplied by BLURRED. ONCE: the first finding is
 * enough. SURE: measuring again can not change the finding. ALL: the finding names no host. */
#define BLURRED 3
enum over { CLUSTER, SUBNETS, EACH_HOST, HOSTS = EACH_HOST, INTERFACES, PAIRS };
enum { SEVERAL = 1, USED = 2, TIMES = 4, BLURS = 8, COARSE = 16, ONCE = 32, SURE = 64, ALL = 128 };

/* clang-format off */
static const struct {
  rule *judge;
  double bound;
  enum over over;
  unsigned when;
  const char *why, *advice;
  int (*subnet)(const struct doctor_facts *facts); /* the only subnet that MPI should use */
} rules[DOCTOR_KINDS] = {
    /* Half a processor is more than a system's own services use. */
    [DOCTOR_BUSY] = {judge_busy, 0.5, HOSTS, BLURS | ONCE,
        "times are not reliable: a host is reported only if it is 5 times slower",
        "end the other programs, or give ranks cores of their own; then run the doctor again",
        NULL},
    /* A twentieth of the time is more than chance. */
    [DOCTOR_STOLEN] = {judge_stolen, 0.05, HOSTS, BLURS,
        "times are not reliable: a host is reported only if it is 5 times slower",
        "raise the container's cpu.max, or use another instance type; then run the doctor again",
        NULL},
    [DOCTOR_SPINNING] = {judge_waiting, 2000, HOSTS, COARSE | BLURS | ONCE,
        "ranks that wait keep the processors from those that have work",
        "mpirun --mca mpi_yield_when_idle 1, or no more ranks than processors", NULL},
    [DOCTOR_SAME_CPU] = {judge_binding, 0, HOSTS, ONCE | SURE,
        "ranks take turns on these CPUs while others are idle",
        "mpirun --bind-to none, or bind every rank to a core of its own", NULL},
    [DOCTOR_DOWN] = {judge_down, 0, INTERFACES, SEVERAL | SURE,
        "a subnet that not all hosts have carries no exchange",
        "check its cable, or run on that host: ip link set dev INTERFACE up", NULL},
    [DOCTOR_DUPLEX] = {judge_duplex, 0, INTERFACES, SEVERAL | SURE,
        "a link that cannot send while it receives loses packets under load",
        "check negotiation at both ends of the cable: ethtool -s INTERFACE autoneg on", NULL},
    [DOCTOR_NEGOTIATED] = {judge_speed, 0, HOSTS, USED | SURE,
        "every exchange waits for the slowest link",
        "check its cable and switch port: ethtool INTERFACE on that host", NULL},
    [DOCTOR_SLOW_HOST] = {judge_slow_host, 1.6, HOSTS, SEVERAL | COARSE,
        "every exchange waits for the slowest host",
        "check its link, cable, switch port and rate limits: ethtool and tc qdisc show on that "
        "host",
        NULL},
    /* Among many pairs one is more often slow by chance, so the bound is higher. */
    [DOCTOR_SLOW_PAIR] = {judge_pair, 2, PAIRS, SEVERAL | TIMES,
        "exchanges that use this way wait for it",
        "check the path between these two: links (ethtool on both), switches, cables, routing",
        NULL},
    /* 1 and 2.5 Gbit/s differ by more than this ratio, repeated measurements of one link by
     * less. */
    [DOCTOR_WRONG_INTERFACE] = {judge_subnet, 1.6, SUBNETS, USED | TIMES | ONCE | ALL,
        "every exchange takes as long as the slower one needs",
        "let MPI use the faster one alone", doctor_fastest_subnet},
    [DOCTOR_MTU] = {judge_mtu, 0, HOSTS, USED | SURE,
        "packets larger than the other side takes are lost silently",
        "ip link set dev INTERFACE mtu MTU there, as on the others", NULL},
    [DOCTOR_ODD_INTERFACE] = {judge_interface_choice, USED_PART, HOSTS, USED,
        "its other traffic takes another interface, which may be slower",
        "name the interface, the same on every host; if it is named already, check the routes "
        "there: ip route",
        doctor_used_subnet},
    [DOCTOR_MPI_SLOW] = {judge_mpi, 3, HOSTS, USED | TIMES | ALL,
        "the network carries more than MPI sends over it",
        "check what MPI uses: mpirun --mca pml ob1 --mca btl tcp,self,vader; UCX_NET_DEVICES; a "
        "VPN",
        NULL},
    [DOCTOR_FIREWALL] = {judge_firewall, 0, CLUSTER, USED | TIMES | ALL,
        "MPI's own ports may be open, but others that programs choose are not",
        "open the ports between the hosts", NULL},
    [DOCTOR_LINK_SPEED] = {judge_link, 0.6, CLUSTER, USED | TIMES | ALL,
        "something between the hosts, or on them, holds the traffic back",
        "look for errors (ethtool -S), other traffic, a slower switch; compare iperf3 -P 4",
        NULL},
    [DOCTOR_BRIDGE] = {judge_bridge, 0, INTERFACES, ONCE | SURE | ALL,
        "a library may take it for a network of all hosts, and wait for ever",
        "--mca btl_tcp_if_exclude lo,NAME; oob_tcp_if_exclude; NCCL_SOCKET_IFNAME=^NAME", NULL},
    [DOCTOR_LOOPBACK_NAME] = {judge_loopback_name, 0, HOSTS, SEVERAL | SURE,
        "gloo and MPICH look the name up, and others then connect to themselves",
        "put its real address into /etc/hosts, or set the interface: GLOO_SOCKET_IFNAME, "
        "HYDRA_IFACE",
        NULL},
    [DOCTOR_CLOCK] = {judge_clock, 1, HOSTS, SEVERAL | SURE,
        "files, certificates and logs of several hosts contradict each other",
        "set the clock of that host: chronyc or ntpd", NULL},
};
/* clang-format on */

static void add_finding(struct doctor_diagnosis *diagnosis, enum doctor_kind kind,
                        const struct question *at) {
  if (diagnosis->count == DOCTOR_MAX_FINDINGS) {
    diagnosis->more++;
    return;
  }
  struct doctor_finding *finding = &diagnosis->findings[diagnosis->count++];
  *finding = (struct doctor_finding){.kind = kind,
                                     .host = at->of_all ? -1 : at->host,
                                     .sure = rules[kind].when & SURE,
                                     .why = rules[kind].why,
                                     .advice = rules[kind].advice,
                                     .subnet = -1};
  memcpy(finding->seen, at->seen, sizeof finding->seen);
  if (rules[kind].subnet && !diagnosis->has_subnet) { /* the settings are printed once */
    finding->subnet = rules[kind].subnet(at->facts);
    diagnosis->has_subnet = true;
  }
}

/* Applies a rule to all hosts, pairs or other things for which it is made. True if it has a
 * finding. */
static bool apply_rule(struct question *at, enum doctor_kind kind, bool blurred,
                       struct doctor_diagnosis *diagnosis) {
  const struct doctor_facts *facts = at->facts;
  const enum over over = rules[kind].over;
  bool found = false;
  at->bound = rules[kind].bound * (blurred && rules[kind].when & COARSE ? BLURRED : 1);
  for (at->host = 0; at->host < (over < EACH_HOST ? 1 : facts->host_count); at->host++) {
    at->the = &facts->hosts[at->host];
    const int others = over == INTERFACES ? at->the->interface_count
                       : over == PAIRS    ? facts->host_count
                       : over == SUBNETS  ? facts->subnet_count
                                          : 1;
    for (at->other = 0; at->other < others && !(found && rules[kind].when & ONCE); at->other++) {
      at->one = over == INTERFACES ? &at->the->interfaces[at->other]
                : at->used >= 0    ? doctor_find_interface(facts, at->host, at->used)
                                   : NULL;
      at->of_all = rules[kind].when & ALL;
      if (rules[kind].judge(at)) {
        add_finding(diagnosis, kind, at);
        found = true;
      }
    }
  }
  return found;
}

static void find_common_mtu(struct question *at) {
  int most = 0;
  for (int h = 0; at->used >= 0 && h < at->facts->host_count; h++) {
    const int mtu = doctor_find_interface(at->facts, h, at->used)->mtu, count = count_mtu(at, mtu);
    if (count > most)
      most = count, at->mtu = mtu;
  }
}

/* Applies the rules in the order of their kinds: causes come before consequences. */
void doctor_judge(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  const int hosts = facts->host_count;
  double *best = calloc(2 * (size_t)(hosts + 1), sizeof *best);
  struct question at = {.facts = facts,
                        .used = hosts > 1 ? doctor_used_subnet(facts) : -1,
                        .sends = best,
                        .receives = best + hosts + 1};
  unsigned holds = (hosts > 1 ? SEVERAL : 0) | (at.used >= 0 ? USED : 0) | TIMES;
  *diagnosis = (struct doctor_diagnosis){.count = 0};
  if (!best)
    return;
  find_best_rates(&at);
  find_common_mtu(&at);
  for (enum doctor_kind kind = 0; kind < DOCTOR_KINDS; kind++)
    if (!(rules[kind].when & (SEVERAL | USED | TIMES) & ~holds) &&
        apply_rule(&at, kind, !(holds & TIMES), diagnosis) && rules[kind].when & BLURS)
      holds &= ~(unsigned)TIMES;
  free(best);
}
