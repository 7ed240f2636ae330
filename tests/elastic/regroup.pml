/*
 * The protocol by which elastic ranks copy their parts, commit a step, and regroup after a death (docs/elastic.md).
 * tests/elastic/check_model.sh exhausts all interleavings with spin.
 *
 * N ranks train. After each step a rank keeps its own part of the state, sends a copy to its partner, and discards
 * older parts once all ranks have agreed that the step is complete. DEATHS ranks die, at any point. One more rank may
 * stop once, at any point, and returns later: until then it answers nothing, and nobody can tell it from a slow one.
 *
 * Survivors decide the next group by single-decree Paxos: one instance for each generation, whose acceptors are the
 * members of the old group. A value is the members and the step of the next group. A quorum is a majority of the old
 * members, or all of them but those that are proven dead. A request is one atomic exchange with a member that lives
 * and is not stopped; a proposer that dies between two requests loses the rest of its messages.
 *
 * With -DJOIN three ranks train, and rank 3 is a process that waits to join. The ranks leave the group to let it in, at
 * any point, or because one of them is lost. It has no vote on the decision, and enters the group of a decision that a
 * member gives it. A member records the decision in the shared folder before. A rank whose quorum needs proofs of death
 * reads the record first, because the members that let the process in may have ended since.
 *
 * Planted faults, each of which the checker must find:
 *   -DMINORITY           any members are a quorum: two groups form
 *   -DOLD_BALLOT         a member accepts a proposal although it has promised a later one: two groups form
 *   -DDISCARD_EARLY      a rank discards older parts before the agreement: a part with a living holder is lost
 *   -DIGNORE_ACCEPTED    a proposer ignores values that members have accepted: two decisions
 *   -DENTER_ACCEPTED     (JOIN) a process enters the group of a value that a member has accepted: two groups form
 *   -DNO_RECORD          (JOIN) a rank does not read the record: two groups form
 */
#define N 4
#ifndef GENERATIONS
#define GENERATIONS 2 /* one regroup */
#endif
#ifndef STEPS
#define STEPS 2
#endif
#ifndef DEATHS
#define DEATHS 2
#endif

#ifndef ATTEMPTS
#define ATTEMPTS 3
#endif

#define bit(r) (1 << (r))
#define has(set, r) (((set) >> (r)) & 1)
#define count(set) (has(set, 0) + has(set, 1) + has(set, 2) + has(set, 3))
#define all ((1 << N) - 1)
#ifdef JOIN
#define OWNERS 3
#else
#define OWNERS N
#endif
#define partner(r) (((r) + 1) % OWNERS)
#define owners ((1 << OWNERS) - 1)
#define gone (dead | finished) /* the processes that have ended */
#define answers(r) (!has(gone, r) && !has(stopped, r))

byte dead, stopped;
byte deaths = 0;
bool has_stopped = false;

/* Bit r: rank r holds its own part, or its partner holds the copy, of each step. */
byte own[STEPS + 1], copied[STEPS + 1];
byte agreed = 0;               /* the newest step that all ranks have agreed on */
byte arrived_at_agreement[STEPS + 1];

/* Acceptors: by generation, then by rank. A value is members, and step in the upper bits; 0 is none. */
byte promised[GENERATIONS * N], accepted_ballot[GENERATIONS * N], accepted[GENERATIONS * N];
byte decided[GENERATIONS];     /* what a proposer has decided: for the invariants, no rank reads it */
byte known[GENERATIONS * N];   /* the decision, as each rank knows it */
byte members[GENERATIONS];     /* of each generation, by its decision */
byte waiting[GENERATIONS];     /* bit r: rank r has left the group of this generation and waits for the next one */
byte entered[GENERATIONS];     /* ranks that have entered the group */
byte record;                   /* the decision on the first regroup, in the shared folder; 0: none */
byte recorders;                /* bit r: rank r has found or made the record, and gives places */
byte finished;                 /* bit r: the process of rank r has ended: after the run's last barrier, or by an error */

#define at(g, r) ((g) * N + (r))
#define make_value(set, s) ((set) | ((s) << N))
#define members_of(value) ((value) & all)
#define step_of(value) ((value) >> N)

/* Whether each part of a step has a holder in `set`. The ring is that of the first group. */
#define held(s, set, r) ((has(own[s], r) && has(set, r)) || (has(copied[s], r) && has(set, partner(r))))
#define is_complete(s, set) (held(s, set, 0) && held(s, set, 1) && held(s, set, 2) && (OWNERS == 3 || held(s, set, 3)))
/* Whether a rank and its partner, which hold all copies of a part, are both in `set`. */
#define has_pair(set) (((set) & (((set) << 1) | ((set) >> (OWNERS - 1)))) != 0)

/* The group of a generation has failed for its members once one of them cannot take part. */
bool grows; /* the ranks have agreed to let rank 3 in */
/* A process that waits to join is in no group, whatever a decision says. */
#ifdef JOIN
#define outside ((known[at(0, 3)] == 0) << 3)
#else
#define outside 0
#endif

#define is_broken(g) (((g) == 0 && grows) || members[g] & (dead | stopped | waiting[g] | (finished & ~entered[g])) != 0)

#ifdef MINORITY
#define is_quorum(g, set) ((set) != 0)
#else
#define is_quorum(g, set) (2 * count(set) > count(members[g]) || ((set) | (members[g] & gone)) == members[g])
#endif

/* A stopped rank does nothing until it returns. A dead one leaves its process at once. */
#define runs (!has(stopped, me))

/* The values of an attempt that has ended do not multiply the states. */
inline forget() { ballot = 0; acks = 0; value = 0; best = 0; ready = 0; other = 0; cut = 0 }

/* The members that answer, and a rank that knows the decision and answers, plus 1; 0: none. */
#define answering(g) (members[g] & ~(gone | stopped))
#define knows(g, r) (answers(r) && known[at(g, r)])
#define knower(g) (knows(g, 0) -> 1 : (knows(g, 1) -> 2 : (knows(g, 2) -> 3 : (knows(g, 3) -> 4 : 0))))
inline learn() { known[at(g, me)] = known[at(g, knower(g) - 1)] }

/* Asks these members. */
inline ask_to_accept(set) {
  other = 0;
  do
  :: other < N ->
     if
#ifdef OLD_BALLOT
     :: has((set) & members[g], other) && answers(other) ->
#else
     :: has((set) & members[g], other) && answers(other) && promised[at(g, other)] <= ballot ->
#endif
        promised[at(g, other)] = ballot;
        accepted_ballot[at(g, other)] = ballot; accepted[at(g, other)] = value;
        acks = acks | bit(other)
     :: else
     fi;
     other++
  :: other == N -> other = 0; break
  od
}

#ifdef ENTER_ACCEPTED
#define place_of(r) accepted[at(0, r)]
#else
#define place_of(r) known[at(0, r)]
#endif
#ifdef ENTER_ACCEPTED
#define gives_place(r) (answers(r) && has(members_of(place_of(r)), 3))
#else
#define gives_place(r) (answers(r) && has(members_of(place_of(r)), 3) && has(recorders, r))
#endif
inline take_place(r) { known[at(0, 3)] = place_of(r) }

#ifdef NO_RECORD
#define is_in_record(g, set) false
#else
/* Whether a quorum that needs proofs of death must take the value of the record. */
#define is_in_record(g, set) ((g) == 0 && record != 0 && 2 * count(set) <= count(members[g]))
#endif

inline select_victim() {
  if
  :: victim = 0
  :: victim = 1
  :: victim = 2
  :: victim = 3
  fi
}

#ifdef SLOW
#define select_slow() victim = SLOW
#else
#define select_slow() select_victim()
#endif

proctype Rank(byte me) {
  byte g = 0, s = 1, other, ballot, acks, value, best, ready, cut;

  {
#ifdef COMMIT
  /* Training: own part, copy, agreement. */
  do
  :: runs && s > STEPS -> break
  :: runs && s <= STEPS && is_broken(0) -> goto left
  :: runs && s <= STEPS && !is_broken(0) ->
     atomic { runs -> own[s] = own[s] | bit(me) };
#ifdef DISCARD_EARLY
     atomic { own[s - 1] = own[s - 1] & ~bit(me); copied[s - 1] = copied[s - 1] & ~bit((me + N - 1) % N) };
#endif
     /* The copy arrives, or the partner is gone. */
     if
     :: atomic { runs && answers(partner(me)) -> copied[s] = copied[s] | bit(me) }
     :: atomic { runs && is_broken(0) -> skip }
     fi;
     if
     :: atomic { runs && has(copied[s], me) -> arrived_at_agreement[s] = arrived_at_agreement[s] | bit(me) }
     :: atomic { runs && !has(copied[s], me) -> goto left }
     fi;
     if
     :: atomic { runs && arrived_at_agreement[s] == all -> agreed = (agreed > s -> agreed : s) }
     :: atomic { runs && is_broken(0) && arrived_at_agreement[s] != all -> goto left }
     fi;
     if
     :: atomic { runs -> own[s - 1] = own[s - 1] & ~bit(me); copied[s - 1] = copied[s - 1] & ~bit((me + N - 1) % N);
                 s++ }
     fi
  od;
  finished = finished | bit(me);
  goto end;
left:
  waiting[0] = waiting[0] | bit(me);
  goto end;
#else
#ifdef JOIN
  if
  :: me == 3 ->
end_waits: /* valid if the others go on without this process */
     if
     :: atomic { runs && gives_place(0) -> take_place(0) }
     :: atomic { runs && gives_place(1) -> take_place(1) }
     :: atomic { runs && gives_place(2) -> take_place(2) }
     :: atomic { runs && (gone & owners) == owners -> goto end }
     fi;
     goto decided_here
  :: else
  fi;
#endif
  /* The group fails while it trains. */
  runs && is_broken(0);
  goto regroup;
#endif

#ifndef COMMIT
#if GENERATIONS > 2
finish:
  /* The barrier at the end of the run: all members pass it, or regroup. */
  atomic { entered[g] = entered[g] | bit(me) };
  if
  :: atomic { runs && (entered[g] & members[g]) == members[g] -> finished = finished | bit(me); goto end }
  :: atomic { runs && is_broken(g) && (entered[g] & members[g]) != members[g] -> goto regroup }
  fi;
#endif

regroup:
  if
  :: g == GENERATIONS - 1 -> finished = finished | bit(me); goto end
  :: else -> waiting[g] = waiting[g] | bit(me)
  fi;
  do
  /* Learns the decision from a member that answers. */
  :: atomic { runs && knower(g) -> learn(); break }
  /* Leads: no member before it answers, and those that answer are a quorum and have left the old group. Asks for
     promises, all at once: a proposer that dies between two promises leaves only promises, which block nothing. The
     ballot is above all that it has seen. */
  :: atomic {
       runs && !knower(g) && (answering(g) & (bit(me) - 1)) == 0 && is_quorum(g, answering(g)) &&
       (answering(g) & ~waiting[g]) == 0 ->
       other = 0;
       do
       :: other < N ->
          if
          :: has(answering(g), other) && promised[at(g, other)] > ballot -> ballot = promised[at(g, other)]
          :: else
          fi;
          other++
       :: other == N -> break
       od;
       ballot = (ballot / N + 1) * N + me;
       if
       :: ballot >= (ATTEMPTS + 1) * N -> finished = finished | bit(me); goto end
       :: else
       fi;
       ready = answering(g); other = 0;
       do
       :: other < N ->
          if
          :: has(ready, other) ->
             promised[at(g, other)] = ballot;
#ifndef IGNORE_ACCEPTED
             if
             :: accepted_ballot[at(g, other)] > best ->
                best = accepted_ballot[at(g, other)]; value = accepted[at(g, other)]
             :: else
             fi
#endif
          :: else
          fi;
          other++
       :: other == N -> break
       od;
       if
       :: value == 0 ->
          if
          :: is_complete(agreed, ready) -> value = make_value(ready, agreed)
          :: else -> value = make_value(ready, 0)
          fi;
          /* No part is lost that has a living holder: it takes a rank and its partner. */
          assert(finished || step_of(value) >= agreed || has_pair(~ready & owners));
#ifdef JOIN
          if
          :: g == 0 && answers(3) -> value = value | bit(3)
          :: skip /* its request has not arrived */
          fi
#endif
       :: else
       fi;
       ready = 0; best = 0; other = 0
     };
     /* Requests to all members at once: any of them arrive first. Others act, or this rank dies or stops, before the
        rest. */
     atomic {
       runs ->
#ifdef JOIN
       /* In the order of ranks only: otherwise there are three times as many states. The model without processes that
          join has all orders. */
       do
       :: other < N - 1 -> cut = cut | bit(other); other++
       :: break
       od;
#else
       do
       :: other < N -> other++
       :: other < N -> cut = cut | bit(other); other++
       :: other == N -> break
       od;
#endif
       ask_to_accept(cut)
     };
     atomic { runs -> ask_to_accept(all & ~cut); cut = 0 };
     atomic {
       runs ->
       if
       :: is_quorum(g, acks) && is_in_record(g, acks) -> known[at(g, me)] = record; forget(); break
       :: is_quorum(g, acks) && !is_in_record(g, acks) ->
          /* One group: the other members of another one, if there ever was, have ended. */
          assert(decided[g] == 0 || decided[g] == value || (members_of(decided[g]) & ~(gone | outside | bit(me))) == 0);
          decided[g] = value; members[g + 1] = members_of(value);
          known[at(g, me)] = value; forget(); break
       :: else -> forget()
       fi
     }
  od;
decided_here:
  /* The decision may leave this rank out: it was stopped, and another group goes on. It ends. */
  if
  :: !has(members_of(known[at(g, me)]), me) -> goto end
  :: else -> assert(known[at(g, me)] == decided[g]);
#ifdef JOIN
     atomic {
       runs ->
       if
       :: has(members_of(known[at(g, me)]), 3) -> record = known[at(g, me)]; recorders = recorders | bit(me)
       :: else
       fi
     }
#endif
#if GENERATIONS > 2
     g++; goto finish
#endif
  fi;
#endif
end:
  skip
  } unless { has(dead, me) };
  /* Ranks that have ended do not multiply the states. */
  atomic { g = 0; s = 0; forget() }
}

/* Kills up to DEATHS ranks, and stops one for a while, at any point. */
proctype Fate() {
  byte victim;
end:
  do
  :: atomic { deaths < DEATHS ->
       select_victim();
       dead = dead | bit(victim); stopped = stopped & ~bit(victim); deaths++; victim = 0 }
#ifdef JOIN
  :: atomic { !grows && answers(3) -> grows = true }
#endif
#ifndef COMMIT
  :: atomic { !has_stopped -> select_slow(); stopped = bit(victim) & ~dead; has_stopped = true; victim = 0 }
#endif
  :: stopped -> stopped = 0
  od
}

#ifdef COMMIT
/* When all survivors have left the broken group, what they hold decides what they go on from. */
proctype Judge() {
  byte here;
  do
  :: atomic {
       dead && ((dead | waiting[0] | finished) == all) ->
       here = all & ~dead;
       /* A step that all have agreed on is lost only with a rank and its partner. */
       assert(is_complete(agreed, here) || (agreed < STEPS && is_complete(agreed + 1, here)) ||
              has_pair(dead));
       break
     }
  :: atomic { finished == all -> assert(is_complete(STEPS, all)); break }
  :: dead == all -> break
  od
}
#endif

init {
  atomic {
    members[0] = owners;
    own[0] = owners; copied[0] = owners;
#ifdef COMMIT
    run Judge();
#else
    own[1] = owners; copied[1] = owners; agreed = 1;
#endif
    run Rank(0); run Rank(1); run Rank(2); run Rank(3); run Fate()
  }
}
