/* Derives the doctor's findings from the facts by a table of rules. Uses neither MPI nor the
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
  double *sends, *receives;           /* best rate of each host; last entry: the best of all */
  int host, other;                    /* the host to judge; its interface, a subnet or a host */
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

/* Emulated hosts are all on one machine, so they are all busy. If several hosts are busy, the
 * finding names no host. */
static bool judge_busy(struct question *at) {
  const struct doctor_host *the = at->the;
  int busy = 0;
  for (int h = 0; h < at->facts->host_count; h++)
    busy += is_busy(&at->facts->hosts[h], at->bound);
  at->of_all = busy > 1;
  describe(at, "%s: other programs use %.1f of the %d CPUs that %d rank%s may use%s", the->name,
           the->others, the->usable, TUNE_COUNTED(the->ranks),
           busy > 1 ? ", and other hosts are as busy" : "");
  return is_busy(the, at->bound);
}

static bool judge_stolen(struct question *at) {
  const struct doctor_host *the = at->the;
  describe(at,
           "%s: the hypervisor took %.0f %% of the time, and the container's CPU limit stopped the "
           "host %d times",
           the->name, 100 * the->stolen, the->lost_periods);
  return the->stolen >= at->bound || the->lost_periods >= 2; /* a single stop may be chance */
}

/* A scheduler's time slice takes a few milliseconds. With twice as many ranks as processors, a hop
 * takes 4,000 to 9,000 us if idle ranks spin, and 6 us if they yield. This lower bound is used if
 * the cause is known: ranks do not yield, and there are more ranks than CPUs. */
#define CROWDED_MICROSECONDS 300.0

static bool judge_waiting(struct question *at) {
  const struct doctor_host *the = at->the;
  const bool off = at->facts->yields == 0, crowded = off && the->ranks > the->usable;
  describe(at,
           "a message that goes round the ranks of a host takes %.0f us per hop, with %d ranks on "
           "%d CPUs of %s%s",
           the->local_hop, the->ranks, the->usable, the->name,
           off ? ", mpi_yield_when_idle is off" : "");
  return the->local_hop >= (crowded ? CROWDED_MICROSECONDS : at->bound);
}

/* True if ranks share some of the host's CPUs while its other CPUs are not used. */
static bool judge_binding(struct question *at) {
  const struct doctor_host *the = at->the;
  describe(at, "%s: %d ranks are bound to the same %d of %d CPUs", the->name, the->ranks,
           the->usable, the->cpus_online);
  return the->usable > 0 && the->ranks > the->usable && the->usable < the->cpus_online;
}

/* --- Interfaces: facts of the kernel, which no load can change ---------------------------------*/

/* Returns the number of other hosts' interfaces that are up in the subnet of this interface. With
 * `address`, counts only interfaces that also have this interface's address. */
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
  describe(at, "%s: %s is down, but it is up on %d other host%s", at->the->name, at->one->name,
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
  describe(at, "%s: the link of %s runs at %d Mbit/s, but the links of other hosts run at %d",
           at->the->name, at->one->name, at->one->speed, fastest);
  return at->one->physical && at->one->speed > 0 && at->one->speed < fastest;
}

static bool judge_duplex(struct question *at) {
  describe(at, "%s: %s runs in half duplex, at %d Mbit/s", at->the->name, at->one->name,
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
  describe(at, "%s: the MTU is %d on %s, but %d on %d of %d hosts", at->the->name, at->one->mtu,
           at->one->name, at->mtu, count_mtu(at, at->mtu), at->facts->host_count);
  return at->one->mtu != at->mtu;
}

/* True if another host has an interface with the same address. */
static bool judge_bridge(struct question *at) {
  const int like = count_similar_interfaces(at, true);
  describe(at, "%s: %s has an address that %d other host%s as well", at->the->name, at->one->name,
           like, like == 1 ? " has" : "s have");
  return at->one->up && !at->one->physical && like > 0;
}

/* --- Subnets and plain TCP ---------------------------------------------------------------------*/

/* A subnet that carries less than this fraction of the traffic counts as unused. */
#define USED_PART 0.1

static bool judge_interface_choice(struct question *at) {
  const double part = doctor_traffic_part(at->facts, at->host, at->used);
  describe(
      at,
      "%s: only %.0f %% of what it sends takes %s, the interface that most hosts' traffic takes",
      at->the->name, 100 * part, at->one->name);
  return part < at->bound;
}

/* True if a host sends in both subnets, as Open MPI does: it splits long messages among all
 * interfaces that it may use. */
static bool sends_in_both(const struct doctor_facts *facts, int subnet, int other) {
  for (int h = 0; h < facts->host_count; h++)
    if (doctor_traffic_part(facts, h, subnet) >= USED_PART &&
        doctor_traffic_part(facts, h, other) >= USED_PART)
      return true;
  return false;
}

/* True if a subnet that carries traffic is slower than the fastest subnet. */
static bool judge_subnet(struct question *at) {
  const int best = doctor_fastest_subnet(at->facts);
  const struct doctor_subnet *slow = &at->facts->subnets[at->other];
  const struct doctor_subnet *fast = &at->facts->subnets[best];
  char network[2][DOCTOR_ADDRESS];
  describe(at,
           "%.0f %% of MPI's traffic takes %s (%s), where plain TCP carries %.2f Gbit/s; %s (%s), "
           "which all hosts also have, carries %.2f",
           100 * doctor_traffic_part(at->facts, -1, at->other),
           doctor_find_interface(at->facts, 0, at->other)->name,
           doctor_format_network(slow->network, slow->netmask, network[0]), slow->tcp,
           doctor_find_interface(at->facts, 0, best)->name,
           doctor_format_network(fast->network, fast->netmask, network[1]), fast->tcp);
  return slow->tcp > 0 && fast->tcp >= at->bound * slow->tcp &&
         (at->other == at->used || sends_in_both(at->facts, at->other, best));
}

/* Links above this speed in Gbit/s are not judged, since one process cannot fill them. */
#define MAX_LINK 25.0

/* Compares the rate of MPI with that of plain TCP, both from this host's partner to this host. */
static bool judge_mpi(struct question *at) {
  const int from = at->host ^ 1; /* the last of an odd number of hosts has no partner and no rate */
  const double tcp = at->the->tcp[at->used];
  const double mpi = tcp > 0 ? at->facts->bandwidth[from * at->facts->host_count + at->host] : 0;
  describe(at,
           "%s to %s: MPI carries %.2f Gbit/s, but plain TCP carries %.2f between the same two "
           "hosts by %s",
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

/* True if a rate is lower than the median of the rates by the ratio, and by more than noise. Noise
 * is four standard deviations, each estimated as 1.4826 median absolute deviations. If the number
 * of rates is even, the higher of the two middle rates is the median, so that slow hosts are
 * reported even if half of the hosts are slow. A rate of 0 was not measured. Fewer than three rates
 * have no outlier. */
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
  for (int pair = 0; pair < 2 * hosts * hosts; pair++) { /* odd numbers: the best of all hosts */
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
  describe(at, "%s: it carries %.2f Gbit/s %s every other host, but the other hosts carry %.2f",
           at->the->name, way[at->host],
           !in   ? "to"
           : out ? "to and from"
                 : "from",
           way[hosts]);
  return out || in;
}

/* Compares the rate between two hosts with the rates that both reach with other hosts. If there are
 * only two hosts, compares it with the rate in the other direction. */
static bool judge_pair(struct question *at) {
  const int hosts = at->facts->host_count;
  const double rate = at->facts->bandwidth[at->host * hosts + at->other];
  const double expected =
      hosts == 2 ? at->sends[hosts] : fmin(at->sends[at->host], at->receives[at->other]);
  describe(at, "%s to %s: the link carries %.2f Gbit/s, but %.2f Gbit/s %s", at->the->name,
           at->facts->hosts[at->other].name, rate, expected,
           hosts == 2 ? "in the other direction" : "with other hosts");
  return rate > 0 && rate * at->bound <= expected;
}

/* --- Faults that MPI tolerates -----------------------------------------------------------------*/

static bool judge_loopback_name(struct question *at) {
  describe(at, "%s: /etc/hosts gives its own name the address %s", at->the->name,
           at->the->loopback);
  return at->the->loopback[0];
}

/* True if the host's clock differs from the clocks of most hosts. If it differs from exactly half
 * of them, the clocks that agree with host 0's clock are taken as right. */
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

/* `over` says to which things a rule is applied: to each host, for example. `when` has flags.
 * SEVERAL: the rule needs several hosts. USED: it needs a subnet that MPI uses. TIMES: it needs
 * accurate times. BLURS: after a finding of this rule, times are inaccurate. COARSE: the rule's
 * bound is then multiplied by BLURRED. ONCE: only the first finding is reported. SURE: another
 * measurement cannot change the finding. ALL: the finding names no host. */
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
    /* The bound is half a processor: services of an idle system use less. */
    [DOCTOR_BUSY] = {judge_busy, 0.5, HOSTS, BLURS | ONCE,
        "times are not reliable, so the doctor reports a slow host only if it is 5 times slower",
        "end the other programs (top lists them), or wait for their end, or give ranks cores of\n"
        "         their own; then run the doctor again",
        NULL},
    /* The bound is a twentieth of the time: less may be chance. */
    [DOCTOR_STOLEN] = {judge_stolen, 0.05, HOSTS, BLURS,
        "times are not reliable, so the doctor reports a slow host only if it is 5 times slower",
        "raise the container's cpu.max, or use another instance type; then run the doctor again",
        NULL},
    [DOCTOR_SPINNING] = {judge_waiting, 2000, HOSTS, COARSE | BLURS | ONCE,
        "waiting ranks occupy processors that the other ranks need for their work",
        "mpirun --mca mpi_yield_when_idle 1, or no more ranks than processors", NULL},
    [DOCTOR_SAME_CPU] = {judge_binding, 0, HOSTS, ONCE | SURE,
        "ranks take turns on these CPUs while others are idle",
        "mpirun --bind-to none, or bind every rank to a core of its own", NULL},
    [DOCTOR_DOWN] = {judge_down, 0, INTERFACES, SEVERAL | SURE,
        "the ranks cannot use a subnet that not all hosts have",
        "check the interface's cable, or run on that host: ip link set dev INTERFACE up", NULL},
    [DOCTOR_DUPLEX] = {judge_duplex, 0, INTERFACES, SEVERAL | SURE,
        "a link that cannot send while it receives loses packets under load",
        "check negotiation at both ends of the cable: ethtool -s INTERFACE autoneg on", NULL},
    [DOCTOR_NEGOTIATED] = {judge_speed, 0, HOSTS, USED | SURE,
        "every exchange waits for the slowest link",
        "check the link's cable and switch port: ethtool INTERFACE on that host", NULL},
    [DOCTOR_SLOW_HOST] = {judge_slow_host, 1.6, HOSTS, SEVERAL | COARSE,
        "every exchange waits for the slowest host",
        "check the host's link, cable, switch port and rate limits: ethtool, tc qdisc show",
        NULL},
    /* The bound is higher than that of hosts: there are more pairs, and one of them is more often
     * slow by chance. */
    [DOCTOR_SLOW_PAIR] = {judge_pair, 2, PAIRS, SEVERAL | TIMES,
        "every exchange between these two hosts waits for this link",
        "check the path between these two: links (ethtool on both), switches, cables, routing",
        NULL},
    /* Links of 1 and 2.5 Gbit/s differ by more than this ratio. Repeated measurements of one link
     * differ by less. */
    [DOCTOR_WRONG_INTERFACE] = {judge_subnet, 1.6, SUBNETS, USED | TIMES | ONCE | ALL,
        "every exchange takes as long as the slower interface needs",
        "let MPI use only the faster interface", doctor_fastest_subnet},
    [DOCTOR_MTU] = {judge_mtu, 0, HOSTS, USED | SURE,
        "packets that are larger than the other side's MTU are lost without an error",
        "run on that host, with the other hosts' MTU: ip link set dev INTERFACE mtu MTU", NULL},
    [DOCTOR_ODD_INTERFACE] = {judge_interface_choice, USED_PART, HOSTS, USED,
        "the rest of its traffic takes another interface, which may be slower",
        "name the same interface on every host; if it is already named, check the routes there: "
        "ip route",
        doctor_used_subnet},
    [DOCTOR_MPI_SLOW] = {judge_mpi, 3, HOSTS, USED | TIMES | ALL,
        "the network can carry more than MPI sends over it",
        "check what MPI uses: mpirun --mca pml ob1 --mca btl tcp,self,vader; UCX_NET_DEVICES; a "
        "VPN",
        NULL},
    [DOCTOR_FIREWALL] = {judge_firewall, 0, CLUSTER, USED | TIMES | ALL,
        "MPI's own ports may be open, but other ports that programs choose are not",
        "open all ports between the hosts in the firewall", NULL},
    [DOCTOR_LINK_SPEED] = {judge_link, 0.6, CLUSTER, USED | TIMES | ALL,
        "something on the hosts or between them slows the traffic down",
        "look for errors (ethtool -S), other traffic, a slower switch; compare iperf3 -P 4",
        NULL},
    [DOCTOR_BRIDGE] = {judge_bridge, 0, INTERFACES, ONCE | SURE | ALL,
        "a library may take the interface for a network between the hosts, and wait for ever",
        "--mca btl_tcp_if_exclude lo,NAME; oob_tcp_if_exclude; NCCL_SOCKET_IFNAME=^NAME", NULL},
    [DOCTOR_LOOPBACK_NAME] = {judge_loopback_name, 0, HOSTS, SEVERAL | SURE,
        "gloo and MPICH look the name up, and other hosts then connect to themselves",
        "put the host's real address into its /etc/hosts, or set the interface: "
        "GLOO_SOCKET_IFNAME, HYDRA_IFACE",
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
  if (rules[kind].subnet && !diagnosis->has_subnet) { /* the settings are printed only once */
    finding->subnet = rules[kind].subnet(at->facts);
    diagnosis->has_subnet = true;
  }
}

/* Applies a rule to every host, pair, interface or subnet, as rules[kind].over says. Returns true
 * if the rule has a finding. */
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
