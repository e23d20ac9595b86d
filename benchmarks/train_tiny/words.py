"""Word lists for the generators. Lists that end in _HELD_OUT appear in evaluation only, never in training text."""

from __future__ import annotations


def split_words(text: str) -> list[str]:
    return [word.strip().replace("_", " ") for word in text.split()]


NAMES = split_words(
    """Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Maria Noah Olivia Paul Rosa Sam Tina Victor Wendy
    Adam Bella Carlos Diana Ethan Fatima George Hannah Ivan Julia Karim Laura Mark Nina Oscar Petra Quinn Ruth Simon
    Tara Uma Vera Walter Xenia Yara Zoe Aisha Bruno Celia Daniel Elena Frank Gina Hugo Ines Jonas Kira Lucas Mila Nora
    Omar Paula Rafael Sara Tom Ursula Vincent Willa Yusuf Zara Amir Bianca Chen Dora Erik Flora Gustav Helen Ibrahim
    Jana Kenji Lily Martin Nadia Otto Priya Ravi Sofia Theo Ulrich Valerie William Ximena Yuki Zack Alice Boris Chloe
    Dylan Edith Farid Greta Hassan Isabel James Kofi Lena Max Nancy Oliver Peter Rita Stefan Tess Viktor Wanda Agnes
    Basil Cora Dmitri Eva Fred Gloria Harry Irene Jasper Karen Lars Molly Nick Opal Pablo Rachel Steve Tilda Lin Mei"""
)
NAMES_HELD_OUT = split_words(
    """Anton Beatrice Conrad Delia Edgar Fiona Gilbert Hilda Igor Jocelyn Klaus Lydia Marcus Naomi Orson Phoebe Roland
    Selma Tobias Veronica Wilfred Amelia Bernard Camille Desmond Esther Fabian Gwen Harold Ingrid Julian Leonora"""
)
CITIES = split_words(
    """Paris London Berlin Madrid Rome Vienna Oslo Dublin Lisbon Athens Cairo Tokyo Lima Boston Chicago Denver Seattle
    Toronto Sydney Delhi Mumbai Beijing Seoul Nairobi Lagos Accra Warsaw Prague Budapest Helsinki Stockholm Copenhagen
    Brussels Amsterdam Zurich Geneva Munich Hamburg Milan Naples Venice Porto Seville Valencia Moscow Kyiv Istanbul
    Ankara Baghdad Tehran Karachi Lahore Dhaka Bangkok Hanoi Manila Jakarta Perth Auckland Bogota Quito Santiago Havana
    Dallas Houston Phoenix Atlanta Miami Detroit Portland Montreal Ottawa Vancouver Tunis Dakar Kampala Osaka Kyoto"""
)
CITIES_HELD_OUT = split_words(
    """Zagreb Belgrade Riga Vilnius Tallinn Krakow Turin Lyon Bristol Glasgow Cardiff Calgary Memphis Tucson Caracas
    Montevideo Casablanca Luanda Harare Nagoya Busan Taipei Brisbane Wellington Malaga Bilbao"""
)
JOBS = split_words(
    """teacher nurse baker farmer doctor driver painter singer writer gardener cook pilot sailor builder dentist tailor
    carpenter lawyer plumber waiter librarian mechanic scientist engineer artist photographer fisherman clerk"""
)
HOBBIES = split_words(
    """chess swimming reading painting cooking dancing running cycling fishing singing hiking gardening skating knitting
    football tennis photography sewing drawing baking"""
)
ANIMALS = split_words(
    """cat dog rabbit fox bear mouse owl duck hen horse cow pig goat sheep frog turtle squirrel hedgehog lion tiger
    elephant monkey penguin parrot bee ant butterfly snail fish whale deer wolf donkey sparrow crow swan beaver mole"""
)
ADJECTIVES = split_words(
    """little small young brave shy kind clever curious happy sleepy quiet gentle cheerful lonely hungry careful proud
    funny old friendly busy tiny playful patient"""
)
COLOURS = split_words("red blue green yellow orange purple white brown pink golden silver grey")
TOYS = split_words(
    """ball kite hat boat drum scarf lantern key bell book basket whistle wagon umbrella puppet marble box map coin
    blanket flute button ribbon teddy_bear paper_plane spinning_top"""
)
PLACES = split_words(
    """garden forest river hill village meadow beach park lake farm barn market school library pond bridge field
    mountain valley harbour orchard kitchen"""
)
FOODS = split_words(
    """apple pear plum cake soup bread pie cookie banana carrot sandwich pancake cheese honey muffin tomato orange peach
    potato salad noodle pizza"""
)
COUNTABLE = split_words(
    """apples books coins marbles stickers pencils cards cookies balls flowers eggs stamps shells buttons oranges
    candles cups toys beads tickets plums stones leaves cakes hats pears balloons crayons muffins keys"""
)
THINGS = split_words(
    """spoon fork knife pan kettle oven fridge table chair lamp mirror clock pillow blanket bed sofa window door broom
    mop bucket sponge towel soap toothbrush comb scissors needle button zipper hammer nail screwdriver saw ladder rope
    shovel rake bicycle car bus train boat plane bridge road map compass telescope camera phone radio computer book
    pencil pen ruler notebook eraser umbrella coat hat glove scarf boot shoe sock backpack wallet key lock candle match
    battery bottle cup plate bowl basket box bag jar piano guitar drum violin ball kite doll puzzle balloon whistle
    tent sleeping_bag flashlight thermometer magnet microscope calendar stamp envelope fan heater iron vacuum_cleaner
    washing_machine toaster blender sink bathtub shower fence gate mailbox bench swing slide sandbox helmet seat_belt
    wheelchair bandage watering_can flower_pot lawn_mower fishing_rod net paddle anchor"""
)
TOPICS = split_words(
    """rain snow wind clouds thunder rainbows the_sun the_moon stars seasons spring summer autumn winter night rivers
    lakes oceans mountains deserts forests islands volcanoes trees leaves flowers seeds roots grass mushrooms fruit
    vegetables milk bread cheese eggs honey rice salt sugar water tea coffee chocolate soup breakfast lunch dinner sleep
    dreams teeth hair hands eyes ears the_heart bones muscles blood feelings friendship kindness honesty patience school
    homework teachers books libraries music dancing painting games sports swimming running cycling walking gardens farms
    markets shops money work holidays birthdays gifts families grandparents babies pets neighbours villages cities roads
    trains boats planes bridges houses kitchens bedrooms windows clocks maps letters phones computers pictures colours
    numbers shapes weather ice fire light shadows sound air sand stones metal wood glass paper wool cotton recycling"""
)
ACTIVITIES = [
    part.strip()
    for part in """make a cup of tea; boil an egg; cook rice; bake bread; make a salad; make pancakes; make a sandwich;
    clean a window; wash the dishes; wash clothes; sweep the floor; clean my room; make my bed; pack a suitcase;
    pack a school bag; water plants; plant a seed; grow tomatoes; take care of a cat; take care of a dog; feed birds;
    wash a car; fix a flat tyre; ride a bike; learn to swim; learn a new word; learn a song; read more books;
    write a letter; write a thank you note; make a new friend; say sorry; help a neighbour; plan a party; plan a picnic;
    wrap a gift; save money; save water; save energy; fall asleep; wake up early; stay healthy; brush my teeth;
    wash my hands; stay warm in winter; stay cool in summer; stay safe on the road; find my lost keys; tie a knot;
    fold a shirt; paint a wall; draw a tree; build a sandcastle; fly a kite; make a paper plane; play hide and seek;
    remember names; study for a test; do my homework; be a good friend; calm down; stop a nosebleed;
    treat a small cut; choose a book; set the table; cook pasta; peel a potato; keep food fresh; cut an onion;
    make lemonade; make soup;
    get to school on time; prepare for a trip; use a map; cross a street; share with others; thank a teacher""".split(";")
]
LISTS: dict[str, list[str]] = {
    "fruits": split_words("apple banana pear plum cherry grape peach orange lemon mango kiwi melon strawberry apricot"),
    "vegetables": split_words("carrot potato onion tomato pea bean cabbage spinach cucumber pumpkin leek radish pepper"),
    "animals": split_words("cat dog horse cow sheep lion tiger bear rabbit fox wolf elephant monkey goat"),
    "birds": split_words("owl duck hen sparrow crow swan eagle parrot penguin robin goose pigeon"),
    "colours": split_words("red blue green yellow orange purple white black brown pink grey"),
    "drinks": split_words("water milk tea coffee juice lemonade cocoa"),
    "clothes": split_words("hat coat scarf shirt sock shoe glove dress sweater jacket belt skirt"),
    "tools": split_words("hammer saw shovel rake ladder wrench drill screwdriver axe brush"),
    "toys": split_words("ball kite doll puzzle drum teddy_bear wagon yo-yo balloon train_set"),
    "school things": split_words("pencil pen ruler book notebook eraser backpack crayon glue lunch_box"),
    "things in a kitchen": split_words("pan pot spoon fork knife plate cup bowl oven fridge kettle"),
    "things to take to the beach": split_words("towel sun_hat water sunscreen ball bucket shovel book umbrella snack"),
    "things to take on a hike": split_words("water map snack jacket hat boots whistle flashlight bandages camera"),
    "sports": split_words("football tennis swimming running cycling basketball skating rowing hockey volleyball"),
    "instruments": split_words("piano guitar drum violin flute trumpet harp cello"),
    "jobs": split_words("teacher nurse baker farmer doctor driver painter pilot cook gardener"),
    "rooms in a house": split_words("kitchen bedroom bathroom hall cellar attic garage study"),
    "ways to travel": split_words("bus train car bicycle boat plane tram ferry"),
    "breakfast foods": split_words("bread egg cereal porridge yogurt pancake toast fruit jam honey"),
    "farm animals": split_words("cow pig goat sheep hen duck horse donkey goose turkey"),
}
