/* Makes the doctor's findings of the facts. Knows neither MPI nor the machine. */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "tools/doctor/doctor.h"
#include "tools/tune/tune.h"

/* --- Findings ----------------------------------------------------------------------------------*/

__attribute__((format(printf, 4, 5))) static void add(struct doctor_diagnosis *diagnosis,
                                                      enum doctor_kind kind, int host,
                                                      const char *format, ...) {
  va_list arguments;
  if (diagnosis->count == DOCTOR_MAX_FINDINGS) {
    diagnosis->more++;
    return;
  }
  struct doctor_finding *finding = &diagnosis->findings[diagnosis->count++];
  *finding = (struct doctor_finding){.kind = kind, .host = host};
  va_start(arguments, format);
  vsnprintf(finding->seen, sizeof finding->seen, format, arguments);
  va_end(arguments);
}

/* --- Subnets -----------------------------------------------------------------------------------*/

static bool in_network(const struct doctor_interface *one, uint32_t address, uint32_t netmask) {
  return one->netmask == netmask && ((one->address ^ address) & netmask) == 0;
}

const struct doctor_interface *doctor_interface_in(const struct doctor_facts *facts, int host,
                                                   int subnet) {
  const struct doctor_subnet *in = &facts->subnets[subnet];
  const struct doctor_host *the = &facts->hosts[host];
  for (int i = 0; i < the->interface_count; i++)
    if (the->interfaces[i].up && in_network(&the->interfaces[i], in->network, in->netmask))
      return &the->interfaces[i];
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
  for (int s = 0; s < facts->subnet_count; s++)
    if (doctor_part_of(facts, -1, s) > (best < 0 ? 0 : doctor_part_of(facts, -1, best)))
      best = s;
  return best;
}

/* --- Processors, and whether times can be believed ---------------------------------------------*/

/* Half a processor is more than a system's own services use. A twentieth of the time that ranks
 * wanted, and more than one period that a container lost, are beyond chance. A scheduler's time
 * slice is a few milliseconds: 4,000 to 9,000 us a hop among twice as many ranks as processors,
 * where 6 us are measured when they yield. Less counts only where the cause is plain. */
#define OTHERS_CPUS          0.5
#define STOLEN_PART          0.05
#define LOST_PERIODS         2
#define STARVED_MICROSECONDS 2000.0
#define CROWDED_MICROSECONDS 300.0

static bool is_busy(const struct doctor_host *host) {
  return host->others >= OTHERS_CPUS && host->others + host->ranks > host->usable;
}

/* Judges the processors. Emulated hosts of one machine are all busy: none is named then. */
static void judge_load(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  const struct doctor_host *worst = facts->hosts;
  int busy = 0;
  for (int h = 0; h < facts->host_count; h++) {
    busy += is_busy(&facts->hosts[h]);
    worst = facts->hosts[h].others > worst->others ? &facts->hosts[h] : worst;
  }
  if (busy)
    add(diagnosis, DOCTOR_BUSY, busy == 1 ? (int)(worst - facts->hosts) : -1,
        "%s: other programs use %.1f of the %d CPUs of %d rank%s%s", worst->name, worst->others,
        worst->usable, TUNE_COUNTED(worst->ranks), busy > 1 ? ", and so on other hosts" : "");
  for (int h = 0; h < facts->host_count; h++)
    if (facts->hosts[h].stolen >= STOLEN_PART || facts->hosts[h].lost_periods >= LOST_PERIODS)
      add(diagnosis, DOCTOR_STOLEN, h,
          "%s: the hypervisor took %.0f %% of the time, and a limit of its container stopped it %d "
          "times",
          facts->hosts[h].name, 100 * facts->hosts[h].stolen, facts->hosts[h].lost_periods);
}

static void judge_waiting(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  const struct doctor_host *worst = facts->hosts;
  for (int h = 1; h < facts->host_count; h++)
    worst = facts->hosts[h].local_hop > worst->local_hop ? &facts->hosts[h] : worst;
  const bool off = facts->yields == 0, crowded = off && worst->ranks > worst->usable;
  if (worst->local_hop >= (crowded ? CROWDED_MICROSECONDS : STARVED_MICROSECONDS))
    add(diagnosis, DOCTOR_SPINNING, (int)(worst - facts->hosts),
        "a message that goes round the ranks of a host takes %.0f us a hop; %d ranks on %d CPUs of "
        "%s%s",
        worst->local_hop, worst->ranks, worst->usable, worst->name,
        off ? ", mpi_yield_when_idle is off" : "");
}

/* Judges ranks that share CPUs although the host has others that they were not given. One finding:
 * the launcher does the same on every host. */
static void judge_binding(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_host *host = &facts->hosts[h];
    if (host->usable == 0 || host->ranks <= host->usable || host->usable >= host->cpus_online)
      continue;
    add(diagnosis, DOCTOR_SAME_CPU, h, "%s: %d ranks are bound to the same %d of %d CPUs",
        host->name, host->ranks, host->usable, host->cpus_online);
    return;
  }
}

/* --- Interfaces: what the kernel says, which no load can change --------------------------------*/

/* Counts the other hosts whose interfaces are up in the subnet of a host's, and those with its very
 * address. */
static int count_like(const struct doctor_facts *facts, int host, const struct doctor_interface *of,
                      bool address) {
  int count = 0;
  for (int h = 0; h < facts->host_count; h++)
    for (int i = 0; h != host && i < facts->hosts[h].interface_count; i++) {
      const struct doctor_interface *one = &facts->hosts[h].interfaces[i];
      count += one->up && in_network(one, of->address, of->netmask) &&
               (!address || one->address == of->address);
    }
  return count;
}

static void judge_states(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  for (int h = 0; h < facts->host_count; h++)
    for (int i = 0; i < facts->hosts[h].interface_count; i++) {
      const struct doctor_interface *one = &facts->hosts[h].interfaces[i];
      const int up = one->up ? 0 : count_like(facts, h, one, false);
      if (up)
        add(diagnosis, DOCTOR_DOWN, h, "%s: %s is down; on %d other host%s it is up",
            facts->hosts[h].name, one->name, TUNE_COUNTED(up));
      if (one->up && one->half_duplex)
        add(diagnosis, DOCTOR_DUPLEX, h, "%s: %s has half duplex, at %d Mbit/s",
            facts->hosts[h].name, one->name, one->speed);
    }
}

/* Judges links of the used subnet that are slower than the fastest of them. */
static void judge_speeds(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                         int used) {
  int speed = 0;
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *one = doctor_interface_in(facts, h, used);
    speed = one->physical && one->speed > speed ? one->speed : speed;
  }
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *one = doctor_interface_in(facts, h, used);
    if (one->physical && one->speed > 0 && one->speed < speed)
      add(diagnosis, DOCTOR_NEGOTIATED, h,
          "%s: the link of %s runs at %d Mbit/s, those of others at %d", facts->hosts[h].name,
          one->name, one->speed, speed);
  }
}

static int count_mtu(const struct doctor_facts *facts, int used, int mtu) {
  int count = 0;
  for (int h = 0; h < facts->host_count; h++)
    count += doctor_interface_in(facts, h, used)->mtu == mtu;
  return count;
}

static void judge_mtus(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                       int used) {
  int common = 0;
  for (int h = 0; h < facts->host_count; h++) {
    const int mtu = doctor_interface_in(facts, h, used)->mtu;
    common = count_mtu(facts, used, mtu) > count_mtu(facts, used, common) ? mtu : common;
  }
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *one = doctor_interface_in(facts, h, used);
    if (one->mtu != common)
      add(diagnosis, DOCTOR_MTU, h, "%s: MTU %d on %s, %d on %d of %d hosts", facts->hosts[h].name,
          one->mtu, one->name, common, count_mtu(facts, used, common), facts->host_count);
  }
}

/* --- Subnets and plain TCP ---------------------------------------------------------------------*/

/* The ratio by which another subnet must be faster: gigabit and 2.5 Gbit/s are further apart, the
 * runs of one and the same link are not. Subnets with less than USED_PART of the traffic are not
 * used. Plain TCP stays above LINK_PART of a link's speed; 25 Gbit/s are beyond what one process
 * can fill. MPI stays above a third of plain TCP. */
#define FASTER_RATIO 1.6
#define USED_PART    0.1
#define LINK_PART    0.6
#define MPI_RATIO    3.0
enum { MAX_LINK = 25000 };

/* Judges the hosts whose traffic takes another subnet than the others'. */
static void judge_ways(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                       int used) {
  for (int h = 0; h < facts->host_count && doctor_part_of(facts, -1, used) > 0; h++) {
    const double part = doctor_part_of(facts, h, used);
    if (part >= USED_PART)
      continue;
    add(diagnosis, DOCTOR_ODD_INTERFACE, h,
        "%s: %.0f %% of what it sends takes %s, as most hosts' does", facts->hosts[h].name,
        100 * part, doctor_interface_in(facts, h, used)->name);
    diagnosis->set_subnet = diagnosis->set_subnet < 0 ? used : diagnosis->set_subnet;
  }
}

/* True if a host sends in both: Open MPI cuts long messages among all that it may use. */
static bool sends_in_both(const struct doctor_facts *facts, int subnet, int other) {
  for (int h = 0; h < facts->host_count; h++)
    if (doctor_part_of(facts, h, subnet) >= USED_PART &&
        doctor_part_of(facts, h, other) >= USED_PART)
      return true;
  return false;
}

/* Judges a subnet that carries traffic, all of it or a part, where another one is faster. */
static void judge_subnets(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                          int used) {
  char networks[2][DOCTOR_ADDRESS];
  int best = 0;
  for (int s = 1; s < facts->subnet_count; s++)
    best = facts->subnets[s].tcp > facts->subnets[best].tcp ? s : best;
  const struct doctor_subnet *fast = &facts->subnets[best];
  for (int s = 0; s < facts->subnet_count && diagnosis->set_subnet < 0; s++) {
    const struct doctor_subnet *slow = &facts->subnets[s];
    if (slow->tcp <= 0 || fast->tcp < FASTER_RATIO * slow->tcp ||
        (s != used && !sends_in_both(facts, s, best)))
      continue;
    add(diagnosis, DOCTOR_WRONG_INTERFACE, -1,
        "%.0f %% of MPI's traffic takes %s (%s), where plain TCP carries %.2f Gbit/s; %s (%s), "
        "which all hosts have too, carries %.2f",
        100 * doctor_part_of(facts, -1, s), doctor_interface_in(facts, 0, s)->name,
        doctor_network(slow->network, slow->netmask, networks[0]), slow->tcp,
        doctor_interface_in(facts, 0, best)->name,
        doctor_network(fast->network, fast->netmask, networks[1]), fast->tcp);
    diagnosis->set_subnet = best;
  }
}

/* Judges what plain TCP carries in the subnet that is used: against MPI of the same pair, and the
 * links. */
static void judge_tcp(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                      int used) {
  const double best = facts->subnets[used].tcp;
  const char *name = doctor_interface_in(facts, 0, used)->name;
  int speed = MAX_LINK;
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *mine = doctor_interface_in(facts, h, used);
    const double tcp = facts->hosts[h].tcp[used],
                 mpi = facts->bandwidth[(h ^ 1) * facts->host_count + h];
    speed = !mine->physical || mine->speed <= 0 ? 0 : mine->speed < speed ? mine->speed : speed;
    if (tcp > 0 && mpi > 0 && tcp < MAX_LINK * 1e-3 && tcp >= MPI_RATIO * mpi)
      add(diagnosis, DOCTOR_MPI_SLOW, -1,
          "%s to %s: MPI carries %.2f Gbit/s, plain TCP %.2f between the same two by %s",
          facts->hosts[h ^ 1].name, facts->hosts[h].name, mpi, tcp, mine->name);
  }
  if (best <= 0)
    add(diagnosis, DOCTOR_FIREWALL, -1, "MPI works, but no plain TCP connection is made by %s",
        name);
  else if (speed < MAX_LINK && best < LINK_PART * speed * 1e-3)
    add(diagnosis, DOCTOR_LINK_SPEED, -1,
        "plain TCP carries %.2f Gbit/s at best, but the slowest link has %.1f", best, speed * 1e-3);
}

/* --- Hosts and pairs ---------------------------------------------------------------------------*/

#define HOST_RATIO        1.6
#define PAIR_RATIO        2.0 /* pairs are many, and one of many is more often late by chance */
#define LATE_RATIO        3.0
#define LATE_MICROSECONDS 100.0 /* less is a longer cable or another switch: it costs nothing */

/* Sorts the values. The better of the two middle values: when half of the hosts are slow, they are
 * the fault, and when two numbers differ, the spread of the good half is the noise. */
static double find_good_median(double *values, int count, bool low_is_bad) {
  tune_median(values, count); /* sorts them */
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

/* Each host's best values with any other, in arrays of hosts: noise and a partner's faults only
 * lower rates and raise times. The last of each is the best of all. */
struct best {
  double *sends, *receives, *times;
};

static void judge_find_best(const struct doctor_facts *facts, const struct best *best) {
  const int hosts = facts->host_count;
  for (int pair = 0; pair < hosts * hosts; pair++) {
    const double rate = facts->bandwidth[pair], time = facts->round_trip[pair];
    double *const sends[] = {&best->sends[pair / hosts], &best->sends[hosts]};
    double *const receives[] = {&best->receives[pair % hosts], &best->receives[hosts]};
    double *const times[] = {&best->times[pair / hosts], &best->times[hosts]};
    for (int k = 0; k < 2; k++) {
      *sends[k] = fmax(*sends[k], rate);
      *receives[k] = fmax(*receives[k], rate);
      *times[k] = time > 0 && (*times[k] <= 0 || time < *times[k]) ? time : *times[k];
    }
  }
}

static void judge_host(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                       int host, const struct best *best) {
  const int hosts = facts->host_count;
  const bool out = doctor_outlier(best->sends[host], best->sends, hosts, HOST_RATIO, true);
  const bool in = doctor_outlier(best->receives[host], best->receives, hosts, HOST_RATIO, true);
  const double *way = out ? best->sends : best->receives, *times = best->times;
  if (out || in)
    add(diagnosis, DOCTOR_SLOW_HOST, host, "%s: %.2f Gbit/s %s every other host, the others %.2f",
        facts->hosts[host].name, way[host],
        !in   ? "to"
        : out ? "to and from"
              : "from",
        way[hosts]);
  if (doctor_outlier(times[host], times, hosts, LATE_RATIO, false) &&
      times[host] >= times[hosts] + LATE_MICROSECONDS)
    add(diagnosis, DOCTOR_LATE_HOST, host,
        "%s: a round trip takes %.0f us to any other host, %.0f us among others",
        facts->hosts[host].name, times[host], times[hosts]);
}

/* Judges hosts and pairs. The expected rate is that of each with others; of two hosts only the
 * directions differ. */
static void judge_hosts(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  const int hosts = facts->host_count;
  double *all = calloc(3 * (size_t)(hosts + 1), sizeof *all);
  const struct best best = {all, all + hosts + 1, all + 2 * (hosts + 1)};
  if (!all)
    return;
  judge_find_best(facts, &best);
  for (int h = 0; h < hosts; h++)
    judge_host(facts, diagnosis, h, &best);
  for (int pair = 0; pair < hosts * hosts; pair++) {
    const int from = pair / hosts, to = pair % hosts;
    const double expected =
        hosts == 2 ? best.sends[hosts] : fmin(best.sends[from], best.receives[to]);
    if (facts->bandwidth[pair] > 0 && facts->bandwidth[pair] * PAIR_RATIO <= expected)
      add(diagnosis, DOCTOR_SLOW_PAIR, from, "%s to %s: %.2f Gbit/s, but %.2f Gbit/s %s",
          facts->hosts[from].name, facts->hosts[to].name, facts->bandwidth[pair], expected,
          hosts == 2 ? "the other way" : "with other hosts");
  }
  free(all);
}

/* --- What MPI does not mind, but others do -----------------------------------------------------*/

#define CLOCK_SECONDS 1.0

static void judge_bridges(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  for (int h = 0; h < facts->host_count; h++)
    for (int i = 0; i < facts->hosts[h].interface_count; i++) {
      const struct doctor_interface *one = &facts->hosts[h].interfaces[i];
      const int like = one->up && !one->physical ? count_like(facts, h, one, true) : 0;
      if (!like)
        continue;
      add(diagnosis, DOCTOR_BRIDGE, -1, "%s: %s has an address that %d other host%s too",
          facts->hosts[h].name, one->name, like, like == 1 ? " has" : "s have");
      return;
    }
}

static void judge_names_and_clocks(const struct doctor_facts *facts,
                                   struct doctor_diagnosis *diagnosis) {
  for (int h = 0; facts->host_count > 1 && h < facts->host_count; h++) {
    const struct doctor_host *host = &facts->hosts[h];
    double by = 0;
    int apart = 0; /* twice the hosts whose clocks differ; of two halves host 0's is right */
    for (int other = 0; other < facts->host_count; other++)
      if (fabs(host->clock - facts->hosts[other].clock) >= CLOCK_SECONDS)
        apart += 2, by = host->clock - facts->hosts[other].clock;
    if (host->loopback[0])
      add(diagnosis, DOCTOR_LOOPBACK_NAME, h, "%s: /etc/hosts gives its own name the address %s",
          host->name, host->loopback);
    if (apart > facts->host_count ||
        (apart == facts->host_count && fabs(host->clock) >= CLOCK_SECONDS))
      add(diagnosis, DOCTOR_CLOCK, h, "%s: its clock differs from the others' by %.1f s",
          host->name, by);
  }
}

/* Causes come before what follows from them: processors, the kernel's word on interfaces, hosts,
 * networks. */
void doctor_judge(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  const bool several = facts->host_count >= 2;
  const int used = several ? doctor_used_subnet(facts) : -1;
  *diagnosis = (struct doctor_diagnosis){.set_subnet = -1};
  judge_load(facts, diagnosis);
  if (!diagnosis->count)
    judge_waiting(facts, diagnosis);
  const bool vague = diagnosis->count > 0;
  judge_binding(facts, diagnosis);
  if (several)
    judge_states(facts, diagnosis);
  if (used >= 0)
    judge_speeds(facts, diagnosis, used);
  if (several && !vague)
    judge_hosts(facts, diagnosis);
  if (used >= 0 && !vague)
    judge_subnets(facts, diagnosis, used);
  if (used >= 0) {
    judge_mtus(facts, diagnosis, used);
    judge_ways(facts, diagnosis, used);
  }
  if (used >= 0 && !vague)
    judge_tcp(facts, diagnosis, used);
  judge_bridges(facts, diagnosis);
  judge_names_and_clocks(facts, diagnosis);
}
