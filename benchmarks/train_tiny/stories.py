"""Short stories from a grammar: each plot is a chain of sentences, each sentence one of several wordings.

Slots are filled once per story, so names, things and places stay the same from the first sentence to the last.
"""

from __future__ import annotations

import random

from benchmarks.train_tiny import words

OPENINGS = [
    "Once upon a time there was a {adj} {animal} named {name}.",
    "Once upon a time, a {adj} {animal} named {name} lived near a {place}.",
    "Once upon a time, in a {adj2} {place}, there lived a {animal} named {name}.",
    "There once was a {adj} {animal} called {name}.",
    "{name} was a {adj} {animal} who lived by the {place}.",
    "In a house near the {place} lived a {adj} {animal} named {name}.",
    "Long ago, a {adj} {animal} named {name} lived in a {place}.",
]
LIKES = [
    "{name} had a {colour} {toy} and played with it every day.",
    "{name} loved a {colour} {toy} more than anything.",
    "The best thing {name} owned was a {colour} {toy}.",
    "{name} liked to walk to the {place2} with a {colour} {toy}.",
]
# Each plot: a chain of choices. A choice is a list of wordings.
PLOTS: dict[str, list[list[str]]] = {
    "lost": [
        LIKES,
        [
            "One {weather} day the {toy} was gone.",
            "One morning {name} could not find the {toy}.",
            "One day {name} came home without the {toy}.",
            "But one {weather} afternoon the {toy} was nowhere to be seen.",
        ],
        [
            "{name} looked under the bed and behind the door, but it was not there.",
            "{name} looked in the {place} and by the {place2}, but found nothing.",
            '"Where can it be?" said {name}, and began to look everywhere.',
            "{name} was so sad that {he} began to cry.",
        ],
        [
            "Then a {animal2} named {name2} came by and asked what was wrong.",
            "{name2} the {animal2} heard this and came to help.",
            "{name} asked {name2} the {animal2} for help.",
        ],
        [
            '"I will help you look," said {name2}.',
            '"Do not worry," said {name2}. "We will find it together."',
            '"Let us think," said {name2}. "Where did you play yesterday?"',
        ],
        [
            "They walked to the {place2}, and there was the {toy}, under a big tree.",
            "At last they found the {toy} behind a stone near the {place2}.",
            "They looked and looked, and at the {place2} they saw something {colour} in the grass.",
            "They went back to the {place2}, and the {toy} was still there, a little wet but not broken.",
        ],
        [
            '"Thank you!" said {name}. "You are a true friend."',
            "{name} hugged {name2} and jumped for joy.",
            "{name} was so happy that {he} danced all the way home.",
        ],
        [
            "From that day on, {name} always put the {toy} back in its box.",
            "From that day on, they played with the {toy} together.",
            "{name} and {name2} were best friends from that day on.",
            "That night {name} slept well, with the {toy} beside the bed.",
        ],
    ],
    "help": [
        [
            "Every morning {name} went to the {place2} to pick a {food}.",
            "{name} liked to go for a walk in the {place2}.",
            "One day {name} was on the way to the {place2}.",
        ],
        [
            "One {weather} day {he} heard a small voice.",
            'There {he} heard someone call, "Help! Help!"',
            "On the way {he} saw that someone was in trouble.",
        ],
        [
            "It was {name2} the {animal2}, who was stuck in the mud.",
            "{name2} the {animal2} had fallen into a deep hole.",
            "A {animal2} named {name2} sat there with a hurt foot.",
            "It was a {animal2} named {name2}, who could not find the way home.",
        ],
        [
            '{name} was afraid, but {he} said, "I will help you."',
            '"Do not be afraid," said {name}. "I am here."',
            "{name} thought hard and then had a good idea.",
        ],
        [
            "{He} took a long rope and pulled with all {his} strength.",
            "{He} ran to get the others, and together they helped {name2}.",
            "{He} gave {name2} some water and a {food}, and then they walked home slowly.",
            "{He} held out a stick, and {name2} held it tight.",
        ],
        [
            "Soon {name2} was safe again.",
            "After a while {name2} was safe and could smile again.",
            "It took a long time, but at last {name2} was safe.",
        ],
        [
            '"You are very kind," said {name2}. "How can I thank you?"',
            '"Thank you, {name}," said {name2}. "You are so brave."',
            "{name2} thanked {name} and gave {him} a {colour} {toy}.",
        ],
        [
            '"You do not have to thank me," said {name}. "Friends help each other."',
            "That evening they ate {food} soup together and told stories.",
            "From then on the two of them met every day at the {place2}.",
            "And {name} learned that even someone small can be a big help.",
        ],
    ],
    "learn": [
        [
            "{name} wanted to learn how to {skill}.",
            "More than anything, {name} wished to {skill}.",
            "All the others could {skill}, but {name} could not.",
        ],
        [
            "{He} tried on Monday, but it did not work.",
            "The first time {he} tried, {he} fell down.",
            "{He} tried and tried, but it was very hard.",
        ],
        [
            '"I will never learn it," said {name}.',
            "{name} felt sad and wanted to give up.",
            '"It is too hard for me," said {name} with a sigh.',
        ],
        [
            "Then {name2}, an old {animal2}, sat down beside {him}.",
            "{name2} the {animal2} saw this and smiled.",
            "A wise {animal2} named {name2} came to the {place}.",
        ],
        [
            '"It was hard for me too," said {name2}. "You must practise a little every day."',
            '"Try again, but slowly," said {name2}. "I will show you."',
            '"No one can do it the first time," said {name2}. "Let us try together."',
        ],
        [
            "So every day {name} went to the {place2} and practised.",
            "{name} tried again the next day, and the day after that.",
            "They practised each morning, in sun and in rain.",
        ],
        [
            "After a week {he} could do it.",
            "And one {weather} morning it worked!",
            "At last, one day, {he} could {skill} as well as all the others.",
        ],
        [
            '"I did it! I did it!" shouted {name}.',
            "{name} was proud, and {name2} was proud too.",
            "Everyone in the {place} clapped their hands.",
        ],
        [
            "Now {name} helps the little ones who want to {skill}.",
            "{name} never gave up again, because {he} knew that practice helps.",
            "And that is how {name} learned to {skill}.",
        ],
    ],
    "share": [
        [
            "One day {name} found a big {food} in the {place2}.",
            "One {weather} day {name} made a {food} all alone.",
            "{name} got a large {food} from {his} grandmother.",
        ],
        [
            '"This is all mine," {he} said, and hid it.',
            "It smelled so good that {name} wanted to eat it all.",
            "{He} sat down under a tree to eat it.",
        ],
        [
            "Then {name2} the {animal2} came along, tired and hungry.",
            "Just then a hungry {animal2} named {name2} walked by.",
            "But {name2}, a {animal2}, had nothing to eat that day.",
        ],
        [
            '"May I have a little?" asked {name2}.',
            '"I have not eaten since yesterday," said {name2}.',
            "{name2} looked at the {food} and said nothing.",
        ],
        [
            "At first {name} did not want to share.",
            "{name} thought about it for a while.",
            "{name} looked at the {food}, and then at {name2}.",
        ],
        [
            "Then {he} cut the {food} in two and gave one half to {name2}.",
            '"Here," said {name}, "half of it is for you."',
            "But {he} saw how thin {name2} was, and gave {him2} the bigger half.",
        ],
        [
            "They sat side by side and ate, and it tasted better than ever.",
            "{name2} smiled, and {name} felt warm inside.",
            "They ate and laughed until the sun went down.",
        ],
        [
            "The next day {name2} came back with a basket full of {food2}s.",
            "A week later it was {name2} who had something to share.",
            "After that the two always ate together.",
        ],
        [
            "{name} learned that sharing makes everyone happy.",
            "And so {name} found a new friend.",
            '"A {food} is good," said {name}, "but a friend is better."',
        ],
    ],
    "storm": [
        LIKES,
        [
            "One evening dark clouds came over the {place}.",
            "One night there was a big storm.",
            "One day the wind began to blow, harder and harder.",
        ],
        [
            "The rain fell, and thunder rolled over the hills.",
            "The trees bent in the wind, and the rain fell all night.",
            "The water in the {place2} rose higher and higher.",
        ],
        [
            "{name} was afraid and hid under a blanket.",
            '"I am scared," whispered {name}.',
            "{name} wanted to run home, but it was too dark.",
        ],
        [
            "Then there was a knock at the door. It was {name2} the {animal2}, who was wet and cold.",
            "Outside, {name2} the {animal2} was calling for help.",
            "Then {he} thought of {name2}, the {animal2}, who had no roof.",
        ],
        [
            '{name} took a deep breath and opened the door. "Come in," {he} said.',
            "{name} forgot {his} fear, took a lantern and went out.",
            '"I must be brave," said {name}, and {he} went to help.',
        ],
        [
            "They sat by the fire and drank hot tea.",
            "They shared a warm blanket and sang songs until the storm was over.",
            "Together they were not afraid any more.",
        ],
        [
            "In the morning the sun came out, and there was a rainbow over the {place}.",
            "When they woke up, the sky was blue again.",
            "In the morning the storm was gone, and the birds were singing.",
        ],
        [
            '"You were very brave," said {name2}.',
            "{name} smiled. Storms were not so bad with a friend.",
            "Since that night {name} has not been afraid of thunder.",
        ],
    ],
    "gift": [
        [
            "Soon it would be the birthday of {name2} the {animal2}.",
            "{name2} the {animal2} was the best friend of {name}.",
            "{name} wanted to give something special to {name2} the {animal2}.",
        ],
        [
            "But {name} had no money to buy a gift.",
            '"What can I give to {name2}?" {he} asked.',
            "{name} thought and thought, but had no idea.",
        ],
        [
            "{He} went to the {place2} to look for something nice.",
            "{He} walked through the {place} and looked around.",
            "{He} asked everyone in the {place}, but no one knew.",
        ],
        [
            "There {he} found some wood, some paint and a bit of string.",
            "Then {he} had an idea: {he} would make a gift with {his} own hands.",
            "{He} found an old {toy} that was broken, and {he} knew what to do.",
        ],
        [
            "All week {name} worked in secret.",
            "{He} worked until late at night.",
            "{He} cut and glued and painted until {his} hands were {colour}.",
        ],
        [
            "On the birthday {he} gave {name2} a {colour} {toy}.",
            "At last it was done: a beautiful {colour} {toy}.",
            "When the day came, {name2} opened the box and saw a {colour} {toy}.",
        ],
        [
            '"Did you make this for me?" asked {name2}.',
            '"It is the best gift of all!" said {name2}.',
            "{name2} could not stop smiling.",
        ],
        [
            "They ate {food} cake and played with the {toy} all day.",
            "{name} was happier than if {he} had got a gift {himself}.",
            "A gift made with love is worth more than gold.",
            "{name2} still has the {toy} today.",
        ],
    ],
    "garden": [
        [
            "One spring day {name} found a tiny seed.",
            "{name} got a small seed from {name2} the {animal2}.",
            "In the {place2} {name} found a strange {colour} seed.",
        ],
        [
            "{He} put it in the ground behind the house.",
            "{He} planted it in a pot by the window.",
            "{He} made a hole in the earth and put the seed inside.",
        ],
        [
            "Every day {he} gave it a little water.",
            "{He} watered it each morning and waited.",
            "Each evening {he} sang a song to it.",
        ],
        [
            "But nothing came up for many days.",
            "A week went by, and there was still nothing to see.",
            '"Why does it not grow?" asked {name}.',
        ],
        [
            '"You must be patient," said {name2}. "Good things take time."',
            '"Wait a little longer," said {name2}.',
            "{name2} the {animal2} told {him} not to give up.",
        ],
        [
            "Then, after a night of rain, there was a small green leaf.",
            "One morning a tiny green plant looked out of the earth.",
            "And at last something green came out of the ground.",
        ],
        [
            "It grew taller and taller, and in summer it had {colour} flowers.",
            "In summer it was as tall as the house and full of {food}s.",
            "Soon there was a big {colour} flower, and all the bees came to see it.",
        ],
        [
            "{name} gave a flower to everyone in the {place}.",
            "{name} and {name2} sat in its shade and were happy.",
            "{name} kept some of the seeds for the next spring.",
            '"It was worth the wait," said {name}.',
        ],
    ],
}
SKILLS = words.split_words(
    "swim fly_a_kite ride_a_bike sing dance paint read whistle skate climb_trees bake_bread juggle row_a_boat"
)
WEATHER = words.split_words("sunny rainy windy cold warm snowy cloudy foggy bright")
SUMMARIES = {
    "lost": ["a {animal} who loses a {toy}", "a lost {toy}", "a {animal} and a {colour} {toy}"],
    "help": ["a {animal} who helps a {animal2}", "a {adj} {animal} and a {animal2} in trouble", "helping others"],
    "learn": ["a {animal} who learns to {skill}", "a {animal} who does not give up", "learning to {skill}"],
    "share": ["a {animal} who learns to share", "a {animal} and a {food}", "sharing"],
    "storm": ["a {animal} in a storm", "a brave {animal}", "a stormy night"],
    "gift": ["a {animal} who makes a gift", "a birthday gift", "a {animal} and a {animal2} who are friends"],
    "garden": ["a {animal} who plants a seed", "a tiny seed", "being patient"],
}
PRONOUNS = (
    {"he": "he", "his": "his", "him": "him", "himself": "himself"},
    {"he": "she", "his": "her", "him": "her", "himself": "herself"},
)


def fix_articles(text: str) -> str:
    """a -> an before a vowel letter."""
    parts = text.split(" ")
    for i in range(len(parts) - 1):
        if parts[i] in ("a", "A") and parts[i + 1].lstrip('"')[:1].lower() in tuple("aeiou"):
            parts[i] += "n"
    return " ".join(parts)


def story(rng: random.Random) -> tuple[str, str]:
    """One story: (what it is about, the text)."""
    name, name2 = rng.sample(words.NAMES, 2)
    animal, animal2 = rng.sample(words.ANIMALS, 2)
    place, place2 = rng.sample(words.PLACES, 2)
    food, food2 = rng.sample(words.FOODS, 2)
    pronouns = rng.choice(PRONOUNS)
    slots = {
        "name": name,
        "name2": name2,
        "animal": animal,
        "animal2": animal2,
        "place": place,
        "place2": place2,
        "food": food,
        "food2": food2,
        "adj": rng.choice(words.ADJECTIVES),
        "adj2": rng.choice(["quiet", "green", "small", "sunny", "far away"]),
        "colour": rng.choice(words.COLOURS),
        "toy": rng.choice(words.TOYS),
        "weather": rng.choice(WEATHER),
        "skill": rng.choice(SKILLS),
        "him2": rng.choice(PRONOUNS)["him"],
        "He": pronouns["he"].capitalize(),
        **pronouns,
    }
    plot = rng.choice(list(PLOTS))
    sentences = [rng.choice(OPENINGS)] + [rng.choice(wordings) for wordings in PLOTS[plot]]
    breaks = {rng.randrange(2, len(sentences)) for _ in range(rng.randrange(3))}
    text = ""
    for i, sentence in enumerate(sentences):
        text += ("" if i == 0 else "\n\n" if i in breaks else " ") + sentence.format(**slots)
    about = rng.choice(SUMMARIES[plot]).format(**slots)
    return fix_articles("a " + about)[2:] if not about.startswith("a ") else fix_articles(about), fix_articles(text)
